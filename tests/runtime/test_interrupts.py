"""A process that has called ``deafen`` ignores signals from then on."""

from __future__ import annotations

import subprocess
import sys

import pytest

WAITING = """
import os, signal, threading, time
from launcher.runtime.faults import Interrupted
from launcher.runtime.signals import deafen, stoppable

threading.Thread(target=time.sleep, args=(0.5,)).start()  # the system may choose it
try:
    with stoppable():
        {within}
    {after}
    print("lives")
except Interrupted as stop:
    print(stop)
"""
KILL = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2)"
CASES = {
    "told in the block": (KILL, "pass", 0, "stopped by SIGTERM\n"),
    "told behind it": ("pass", KILL, -15, ""),
    "deaf in the block": (f"deafen(); {KILL}", "pass", 0, "lives\n"),
    "deaf behind it": ("deafen()", KILL, 0, "lives\n"),
}


@pytest.mark.parametrize(("within", "after", "code", "said"), list(CASES.values()), ids=list(CASES))
def test_a_signal_is_heard_until_deafen(within, after, code, said):
    words = [sys.executable, "-c", WAITING.format(within=within, after=after)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")
