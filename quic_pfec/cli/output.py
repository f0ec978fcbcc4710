"""What all commands say the same way: an error in one line, a missing extra by the command that installs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with one line on stderr."""
    print(f"quic-pfec: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def need_extra() -> Iterator[None]:
    """Turns the ImportError of a missing extra, which names the pip command, into a one-line end."""
    try:
        yield
    except ImportError as error:
        fail(str(error))
