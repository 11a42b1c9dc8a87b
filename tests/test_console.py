"""A reader that leaves early ends no run; a line is not torn by other writers; colors appear on terminals."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main

CHOICES = ("NO_COLOR", "FORCE_COLOR", "TERM")
COLOR = re.compile(r"\x1b\[[\d;]*m")
ROOT = Path(__file__).parents[1]


def test_words_that_nobody_reads_are_no_failure():
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", "--help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(300)) == (b"", 0)


class Pipe(io.RawIOBase):
    """Keeps each piece that is written to it; another process may write between two pieces."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.pieces.append(bytes(memoryview(data)))  # type: ignore[arg-type]
        return len(self.pieces[-1])


REFUSED = """\
error: 1 problem in this request; nothing was started

  train.steps = 0: should be at least 1
    set by: train.steps=0 (command line)
"""


def test_a_message_on_standard_error_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun all ranks and their agent share it, and ``print`` would write the newline separately."""
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(pipe), "utf-8", line_buffering=True))
    assert main(["train.steps=0"]) == 2
    assert pipe.pieces == [REFUSED.encode()]


TOLD = """\
<error:> 2 problems in this request; nothing was started

  <optim.lr> = fast: should be a number
    set by: optim.lr=fast (command line)

  <train.stesp>: unknown key, did you mean 'train.steps'?
    set by: train.stesp=3 (command line)
    (try:    train.steps=3)
"""
WRONG_TWICE = ["optim.lr=fast", "train.stesp=3"]
PLAINLY = TOLD.translate(dict.fromkeys(map(ord, "<>"))).replace("(try:    train.steps=3)", "try:    train.steps=3")


def on_a_terminal(words: list[str], **chosen: str) -> tuple[int, str]:
    """Run ``python -m launcher`` with a terminal as standard error.

    Returns the exit code and the text, with bold red in <> and green in ().
    """
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in CHOICES} | {"TERM": "xterm"} | chosen
    command = [sys.executable, "-m", "launcher", *words]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        text = "".join(iter(lambda: _piece(ours), ""))
        os.close(ours)
        code = process.wait(300)
    text = text.replace("\r\n", "\n")
    return code, re.sub(r"\x1b\[1;31m(.*?)\x1b\[0m", r"<\1>", re.sub(r"\x1b\[32m(.*?)\x1b\[0m", r"(\1)", text))


def _piece(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode()
    except OSError as error:
        if error.errno != errno.EIO:  # a terminal ends like this
            raise
        return ""


def test_on_a_terminal_keys_and_cures_have_colors() -> None:
    assert on_a_terminal(WRONG_TWICE) == (2, TOLD)


@pytest.mark.parametrize(
    "chosen", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}], ids=str
)
def test_without_colors_where_nobody_wants_any(chosen: dict[str, str]) -> None:
    assert on_a_terminal(WRONG_TWICE, **chosen) == (2, PLAINLY)


def test_the_first_word_of_a_runtime_error_is_colored(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "done"}')
    said = f"<error:> {tmp_path}: it is done, so there is nothing to cancel\n"
    assert on_a_terminal(["cancel", str(tmp_path)]) == (1, said)


@pytest.mark.parametrize(("chosen", "colors"), [({}, 0), ({"FORCE_COLOR": "1"}, 8)], ids=["as it is", "FORCE_COLOR"])
def test_in_a_pipe_there_are_colors_only_if_forced(
    chosen: dict[str, str], colors: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**dict.fromkeys(CHOICES, ""), **chosen}.items():
        monkeypatch.setenv(name, value)
    assert main(WRONG_TWICE) == 2
    said = capsys.readouterr().err
    assert (len(COLOR.findall(said)), COLOR.sub("", said)) == (colors, PLAINLY)
