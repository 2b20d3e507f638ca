"""One record, one line, whatever a client put into it."""

from __future__ import annotations

import json
import logging

import pytest

from scheduler_svc.logs import StructuredFormatter


def record(event: str, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("scheduler_svc.test")
    return logger.makeRecord(logger.name, logging.INFO, __file__, 1, event, (), None, extra=extra)


def test_logfmt() -> None:
    line = StructuredFormatter("logfmt", "core").format(
        record("executor joined", executor="gpu-0", blocks=4096, ok=True)
    )
    assert line.split(" ", 1)[1] == 'level=info service=core event="executor joined" executor=gpu-0 blocks=4096 ok=true'


@pytest.mark.parametrize("value", ['a"b', "two\nlines", "a=b", "", "tab\there", "\x1b[31mred", "\x85\u2028"])
def test_odd_values_stay_one_line_and_can_be_read_back(value: str) -> None:
    line = StructuredFormatter("logfmt", "core").format(record("x", value=value))
    assert len(line.splitlines()) == 1
    assert json.loads(line.split("value=", 1)[1]) == value
    as_json = StructuredFormatter("json", "core").format(record("x", value=value))
    assert json.loads(as_json)["value"] == value


def test_json_is_one_line() -> None:
    line = StructuredFormatter("json", "core").format(record("two\nlines\u2028three", value=object()))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["event"] == "two\nlines\u2028three"


def test_exceptions_stay_on_the_line() -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        entry = record("x")
        entry.exc_info = (type(error), error, error.__traceback__)
    line = StructuredFormatter("logfmt", "core").format(entry)
    assert len(line.splitlines()) == 1
    assert "broken" in line


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="logfmt, json"):
        StructuredFormatter("xml", "core")
