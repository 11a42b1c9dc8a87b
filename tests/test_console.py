"""A reader that leaves early, as ``| head`` does, ends nothing; a line that others write beside is not torn."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main

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
    """Keeps each piece that is written to it: between two of them another process may write."""

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


def test_what_is_said_on_standard_error_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun all ranks and their agent share it: ``print`` would write the last line's end apart."""
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(pipe), "utf-8", line_buffering=True))
    assert main(["train.steps=0"]) == 2
    assert pipe.pieces == [REFUSED.encode()]
