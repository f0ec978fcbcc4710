"""Timer slack and priority, asked for in a child so that the tests' own thread stays as it is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, ctypes
from quic_pfec.link.realtime import ask_for_real_time, sharpen_timers
sharpen_timers()
slack = ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK
granted = ask_for_real_time()
print(slack, granted == (os.sched_getscheduler(0) == os.SCHED_FIFO))
"""


def test_what_was_asked_for_is_there() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout == "1000 True\n"
