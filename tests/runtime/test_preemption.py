"""A signal that requests a stop sets a flag; a second one interrupts what waits."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from launcher.runtime import signals
from launcher.runtime.faults import Preempted
from launcher.runtime.signals import StopFlag


def test_a_signal_that_comes_again_at_once_was_sent_once(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    flag = StopFlag()
    assert flag() == 0
    flag.note(signal.SIGTERM)
    now[0] += signals.ONCE_S
    flag.note(signal.SIGTERM)
    assert (flag(), flag.insisted) == (signal.SIGTERM, False)
    now[0] += 0.1
    flag.note(signal.SIGTERM)
    assert flag.insisted


def test_another_signal_is_another_request():
    flag = StopFlag()
    flag.note(signal.SIGUSR1)
    flag.note(signal.SIGTERM)
    assert (flag(), flag.insisted) == (signal.SIGUSR1, True)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_the_exit_code_says_whether_to_try_again(signum, code):
    assert Preempted(signum).code == code


WAITING = """
import os, signal, sys, threading, time
from launcher.runtime.faults import Interrupted
from launcher.runtime.signals import heard

def send():
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        time.sleep(0.2)
        os.kill(os.getpid(), signum)

with heard(forced=FORCED) as told:
    threading.Thread(target=send, daemon=True).start()
    try:
        WAIT
    except Interrupted as stop:
        print(stop, told(), stop.insisted, flush=True)
"""
NATIVE = "import ctypes; lock = ctypes.create_string_buffer(64); libc = ctypes.CDLL(None); "
"""A mutex that is locked twice: no signal interrupts it, as a collective that waits for its peer."""


@pytest.mark.parametrize(
    ("forced", "wait", "code", "said"),
    [
        (False, "time.sleep(30)", 0, "stopped by SIGUSR1 15 True\n"),
        (True, "time.sleep(30)", 0, "stopped by SIGUSR1 15 True\n"),
        (True, NATIVE + "[libc.pthread_mutex_lock(lock) for _ in range(2)]", 128 + signal.SIGTERM, ""),
    ],
    ids=["in Python", "in Python, forced", "in native code"],
)
def test_the_second_signal_ends_what_waits(forced, wait, code, said):
    text = WAITING.replace("FORCED", str(forced)).replace("WAIT", wait)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (code, said), done.stderr
