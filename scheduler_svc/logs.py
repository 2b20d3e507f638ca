"""Structured logs of the scheduler service: one line a record on stderr, logfmt (the default) or JSON.

A record is a fixed event text and named fields::

    log.info("executor joined", extra={"executor": name, "blocks": 4096})
    -> time=2026-01-31T12:00:00.123Z level=info service=core event="executor joined" executor=gpu-0 blocks=4096

Libraries below WARNING stay silent.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from typing import Any

FORMATS = ("logfmt", "json")
LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_BARE = re.compile(r"[\w.,:/@%+\-\[\]<>]+")


def _logfmt(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # A JSON string also escapes line breaks and control characters: a record is one line, whatever a client sent.
    return text if _BARE.fullmatch(text) else json.dumps(text)


class StructuredFormatter(logging.Formatter):
    """LogRecord -> one line of logfmt or JSON; every `extra` becomes a field."""

    def __init__(self, format: str, service: str) -> None:
        super().__init__()
        if format not in FORMATS:
            raise ValueError(f"log format {format!r}: one of {', '.join(FORMATS)}")
        self._json = format == "json"
        self._service = service

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
        }
        if not record.name.startswith(("scheduler_svc", "__main__")):
            fields["logger"] = record.name
        fields.update((key, value) for key, value in record.__dict__.items() if key not in _STANDARD)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return fields

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        if self._json:
            return json.dumps(fields, default=str)
        return " ".join(f"{key}={_logfmt(value)}" for key, value in fields.items())


def configure(service: str, *, level: str = "info", format: str = "logfmt") -> None:
    """Send this process's logs to stderr as `service`. Replaces whatever handlers the root logger had."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(StructuredFormatter(format, service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("scheduler_svc").setLevel(level.upper())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two log flags that every process of the scheduler service takes."""
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="least level that is logged (info)")
    parser.add_argument("--log-format", choices=FORMATS, default="logfmt", help="logfmt, or one JSON object a line")
