"""How much memory a stretch of work takes at its peak, told apart from all that the process did before.

A process's own maximum (getrusage) never falls: after one large hand-off it says the same of every small one. Linux can
be asked to forget it (/proc/self/clear_refs); where it cannot, no figure is given rather than a wrong one. What the
allocator kept or touches anew moves a figure by some MiB.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

__all__ = ["PeakMemory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # man 5 proc


class PeakMemory:
    """The most resident memory since `restart`, beyond what the process had when this object was made."""

    def __init__(self) -> None:
        _give_back()
        self._before_mb = _status_mb("VmRSS")

    def restart(self) -> None:
        """Forgets the peak so far. Raises nothing where the system cannot: `peak_mb` is None then."""
        _give_back()
        try:
            _CLEAR.write_text(_FORGET_PEAK)
        except OSError:
            self._before_mb = None

    def peak_mb(self) -> float | None:
        """MiB, at least 0; None where the system does not say."""
        now_mb = _status_mb("VmHWM")
        return None if now_mb is None or self._before_mb is None else max(0.0, now_mb - self._before_mb)


def _status_mb(name: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), None)


def _give_back() -> None:
    """What was freed goes back to the system: glibc would keep it, and the next stretch would use it unseen."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every C library
        if trim is not None:
            trim(0)
