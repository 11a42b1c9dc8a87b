"""The console shows the progress of a run."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest

from launcher.runtime import console_log
from launcher.runtime.training.progress import PlainProgress, SilentProgress, progress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(n: int, steps: int, **more: float) -> dict[str, float]:
    return {"step": n, "steps": steps, "loss": 4 - n / steps, "lr": 0.0029, "tokens_per_s": 12345.6, **more}


def test_plain_lines_come_at_every_tenth_of_the_way():
    out, clock = io.StringIO(), Clock()
    with progress("plain", out, clock) as shown:
        for n in range(1, 51):
            shown.feed(step(n, 50, step_ms=500))
            clock.now += 0.5
            if n == 25:
                shown.feed({"step": 25, "val_loss": 2.25, "val_accuracy": 0.5})
    assert out.getvalue() == (
        "step 1/50  loss 3.9800  lr 2.9e-03  12.3k tokens/s  eta 0:24\n"
        "step 5/50  loss 3.9000  lr 2.9e-03  12.3k tokens/s  eta 0:22\n"
        "step 10/50  loss 3.8000  lr 2.9e-03  12.3k tokens/s  eta 0:20\n"
        "step 15/50  loss 3.7000  lr 2.9e-03  12.3k tokens/s  eta 0:18\n"
        "step 20/50  loss 3.6000  lr 2.9e-03  12.3k tokens/s  eta 0:15\n"
        "step 25/50  loss 3.5000  lr 2.9e-03  12.3k tokens/s  eta 0:12\n"
        "step 25  validation  loss 2.2500  accuracy 0.5000\n"
        "step 30/50  loss 3.4000  lr 2.9e-03  12.3k tokens/s  eta 0:10\n"
        "step 35/50  loss 3.3000  lr 2.9e-03  12.3k tokens/s  eta 0:08\n"
        "step 40/50  loss 3.2000  lr 2.9e-03  12.3k tokens/s  eta 0:05\n"
        "step 45/50  loss 3.1000  lr 2.9e-03  12.3k tokens/s  eta 0:02\n"
        "step 50/50  loss 3.0000  lr 2.9e-03  12.3k tokens/s\n"
    )


def test_a_slow_run_says_something_every_ten_seconds():
    out, clock = io.StringIO(), Clock()
    with progress("plain", out, clock) as shown:
        for n in range(1, 9):
            shown.feed({"step": n, "steps": 10000})
            clock.now += 4
    assert out.getvalue() == "step 1/10000\nstep 4/10000  eta 11:06:24\nstep 7/10000  eta 11:06:12\n"


def test_a_text_is_printed_as_it_is():
    out = io.StringIO()
    with progress("plain", out) as shown:
        shown.feed({"text": "saved step-000100 [bold]"})
    assert out.getvalue() == "saved step-000100 [bold]\n"


def test_auto_is_plain_without_a_terminal():
    assert type(progress("auto", io.StringIO())) is PlainProgress


def test_off_says_nothing():
    out = io.StringIO()
    with progress("off", out) as shown:
        shown.feed(step(1, 2))
    assert type(shown) is SilentProgress
    assert out.getvalue() == ""


@pytest.fixture
def terminal(monkeypatch):
    """A real terminal of 100 columns: a file to write to, and a function that reads what arrived."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    there, here = os.openpty()
    os.set_blocking(there, False)
    with open(here, "w", encoding="utf-8") as out, open(there, "rb", buffering=0) as screen:

        def seen() -> str:
            out.flush()
            written = b"".join(iter(lambda: screen.read(4096), None))
            return re.sub(rb"\x1b\[[?0-9;]*[A-Za-z]", b"", written).decode()

        yield out, seen


def test_auto_draws_a_bar_on_a_terminal(terminal):
    out, seen = terminal
    clock = Clock()
    with progress("auto", out, clock) as shown:
        for n in (1, 2):
            shown.feed(step(n, 2))
            clock.now += 1
            shown.feed({"step": n, "val_loss": 2.25})
    lines = [line.strip() for line in re.split(r"[\r\n]+", seen())]
    assert "step 1  validation  loss 2.2500" in lines
    assert lines[0].startswith("step 1/2")
    assert any(re.fullmatch(r"step 1/2 ━+╸━+ loss 3.5000  lr 2.9e-03  12.3k tokens/s", line) for line in lines)
    assert any(re.fullmatch(r"step 2/2 ━+ loss 3.0000  lr 2.9e-03  12.3k tokens/s", line) for line in lines)


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress("auto", terminal[0])) is PlainProgress


def test_a_restart_does_not_spoil_the_time_left():
    out, clock = io.StringIO(), Clock()
    with progress("plain", out, clock) as shown:
        for n in (5, 6, 1, 2, 10):
            shown.feed({"step": n, "steps": 10})
            clock.now += 10
    assert out.getvalue().splitlines()[-2:] == ["step 2/10  eta 1:20", "step 10/10"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_copy_of_the_console_has_plain_lines_in_place_of_a_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    drawn = Terminal()
    monkeypatch.setattr(sys, "stdout", drawn)
    with console_log.recorded():
        console_log.keep_in(tmp_path)
        with progress("auto") as shown:
            shown.feed(step(1, 2))
            print("printed above the bar")
            shown.feed({"step": 1, "val_loss": 2.25})
            shown.feed(step(2, 2))
        print("at the end")
    assert "\x1b[" in drawn.getvalue()
    assert "printed above the bar" in drawn.getvalue()
    assert (tmp_path / console_log.NAME).read_text() == (
        "step 1/2  loss 3.5000  lr 2.9e-03  12.3k tokens/s\n"
        "printed above the bar\n"
        "step 1  validation  loss 2.2500\n"
        "step 2/2  loss 3.0000  lr 2.9e-03  12.3k tokens/s\n"
        "at the end\n"
    )
