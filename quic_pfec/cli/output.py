"""What all commands say the same way: an error in one line, a missing extra by the command that installs it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with one line on stderr."""
    print(f"quic-pfec: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON; what a record says of a hand-off (`quic.journal.Entry`) becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry = getattr(record, "entry", None)
        if entry is not None:
            values |= entry.as_dict()
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


def log_to_stderr(level: int, *, as_json: bool = False) -> None:
    """Sets the process's log up: one line a record on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def need_extra() -> Iterator[None]:
    """Turns the ImportError of a missing extra, which names the pip command, into a one-line end."""
    try:
        yield
    except ImportError as error:
        fail(str(error))
