"""Log lines stay one line, whatever is in them."""

from __future__ import annotations

import json
import logging
import platform
import sys

from executor_svc.logs import StructuredFormatter
from executor_svc.malloc import keep_freed_memory


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("executor_svc.link", logging.WARNING, __file__, 1, "session ended", (), None)
    made.__dict__.update(fields)
    return made


def test_logfmt_quotes_what_would_break_a_line() -> None:
    line = StructuredFormatter("logfmt").format(record(reason='a "b"\nc=d', count=3, plain="tcp://h:1", empty=""))
    assert line.count("\n") == 0
    assert 'level=warning service=executor event="session ended"' in line
    assert line.endswith(r'reason="a \"b\"\nc=d" count=3 plain=tcp://h:1 empty=""')


def test_json_carries_fields_and_exceptions() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        made = record(seq=5)
        made.exc_info = sys.exc_info()
    fields = json.loads(StructuredFormatter("json").format(made))
    assert (fields["event"], fields["seq"], fields["level"]) == ("session ended", 5, "warning")
    assert fields["exception"].endswith("ValueError: no")


def test_malloc_thresholds_are_raised_on_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
