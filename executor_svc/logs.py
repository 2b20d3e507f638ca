"""Structured logs of the executor service: one line a record on stderr, logfmt or JSON.

::

    log.info("welcomed", extra={"epoch": "1f.3"})
    -> time=2026-01-31T12:00:00.123Z level=info service=executor event=welcomed epoch=1f.3
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

FORMATS = ("logfmt", "json")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class StructuredFormatter(logging.Formatter):
    """LogRecord -> one line; every ``extra`` becomes a field."""

    def __init__(self, format: str) -> None:
        super().__init__()
        self._json = format == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": "executor",
            "event": record.getMessage(),
        }
        fields.update((key, value) for key, value in record.__dict__.items() if key not in _STANDARD)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields, default=str)
        return " ".join(f"{key}={_logfmt(value)}" for key, value in fields.items())


def _logfmt(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # Quoted as a JSON string, line breaks and control characters are escaped: a record stays one line.
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def configure(format: str, level: str = "info") -> None:
    """Send this process's logs to stderr; libraries stay silent below WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(StructuredFormatter(format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("executor_svc").setLevel(level.upper())
