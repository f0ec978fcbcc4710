"""What all commands say the same way: an error in one line, a missing extra by the command that installs it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with one line on stderr."""
    print(f"quic-pfec: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def check_outputs(*paths: Path | None) -> None:
    """Makes the folders of files that a command will write, and ends it with one line if one of them cannot be written:
    a wrong path must not cost the run. None = not asked for."""
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.exists()
            path.open("ab").close()
            if not there:
                path.unlink()
        except OSError as error:
            fail(f"{path} cannot be written: {error.strerror}")


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
