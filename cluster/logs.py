"""Logs of routers and engines: lines for people, or one JSON object per line. Never a prompt, an id
of a token or an output: they belong to whoever sent them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from contextvars import ContextVar
from typing import Any, TextIO

from cluster.core.errors import HeadwayError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the call that the running code serves; "" outside of calls."""

_IDS = ("request_id", "engine_id", "router_id")


def configure(
    log_format: str, level: str, ids: dict[str, str], stream: TextIO | None = None
) -> None:
    """Take over this process's root logger. ids: engine_id or router_id, told with every line.
    stream: None is the process's standard error."""
    # Not sys.stderr: in its replicas Ray Serve puts a logger of its own there, with other lines.
    handler = logging.StreamHandler(stream or sys.__stderr__)
    makers = {"text": TextFormatter, "json": JsonFormatter}
    handler.setFormatter(makers[log_format](ids))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


class _Formatter(logging.Formatter):
    """ids: of the process. A record's own `extra` may name request_id, engine_id, router_id, and
    `facts`: a dict of plain values."""

    def __init__(self, ids: dict[str, str]) -> None:
        super().__init__()
        self._known = ids

    def ids_of(self, record: logging.LogRecord) -> dict[str, str]:
        found = dict(self._known)
        if request_id := REQUEST_ID.get():
            found["request_id"] = request_id
        found |= {name: getattr(record, name) for name in _IDS if hasattr(record, name)}
        return found

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{whole}.{int(record.msecs):03d}Z"


class JsonFormatter(_Formatter):
    """time (UTC), level, logger, message, the ids that are known, facts, error and stack."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.ids_of(record),
            **getattr(record, "facts", {}),
        }
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line["error"] = describe(error)
            line["stack"] = stack_of(error)
        return json.dumps(line, default=str, separators=(",", ":"))


class TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\n", "\\n")
        ids = [value for value in self.ids_of(record).values() if value not in message]
        name = f"{record.name} {' '.join(ids)}" if ids else record.name
        text = f"{self.formatTime(record)} {record.levelname} {name}: {message}"
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return text
        return "\n".join([text, *(f"    {place}" for place in stack_of(error)), describe(error)])


def describe(error: BaseException) -> str:
    """Type and message, or only the type where the message may quote what was sent: of anything but
    our own errors while a call is served, and of errors that are about values anywhere."""
    told = HeadwayError if REQUEST_ID.get() else (HeadwayError, OSError, RuntimeError)
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, told) else name


def stack_of(error: BaseException) -> list[str]:
    """Where it was raised, outermost first; places only, no source lines and no values."""
    return [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
