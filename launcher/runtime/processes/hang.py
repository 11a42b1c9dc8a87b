"""Finds the rank that keeps the others waiting, and its position, from the stacks of all ranks."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.parallel.local import to_host
from launcher.untrusted.links import open_below

ASK = signal.SIGRTMAX
ANSWER_S = 1.0
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ROUTES = (
    "/torch/_ops.py",
    "/torch/_compile.py",
    "/torch/_dynamo/",
    "/torch/utils/",
)  # on the way to a collective
_FOR_DEVICE = "/launcher/parallel/local.py"


def answer(path: Path) -> None:
    """Makes ``ASK`` write the stacks of all threads to ``path``, even while native code holds the GIL."""
    file = open(open_below(path.parent, path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w")  # noqa: SIM115
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)
    _open.append(file)


_open: list[object] = []  # keeps the files open while the process lives


def stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped a process of this machine."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def culprits(
    pids: Mapping[int, int], stack: Callable[[int], Path], ask: Callable[[int], None]
) -> dict[int, str]:
    """The current work of each rank that is not waiting for another one; ``ask(rank)`` sends it ``ASK``.

    Returns the ranks that a signal has stopped; if there are none, those whose stack does not end in a
    collective, where a rank that waits for another one ends.
    """
    why = "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    halted = {rank: why for rank, pid in pids.items() if stopped(pid)}
    if halted:
        return halted

    # request each stack, and allow some time to write it
    for rank in pids:
        ask(rank)
    end = time.monotonic() + ANSWER_S
    texts = dict.fromkeys(pids, "")
    while time.monotonic() < end and not all(map(_whole, texts.values())):
        time.sleep(0.02)
        texts = {rank: _read(stack(rank)) for rank in pids}
    return {rank: _told(text, pids[rank]) for rank, text in texts.items() if not waits(text)}


def _whole(text: str) -> bool:
    """Whether a stack is complete: the main thread is written last."""
    return bool(text) and text.endswith("\n") and bool(_FRAME.findall(text))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def waits(text: str) -> bool:
    """Whether a stack, or that of a thread which it waits for, ends in a collective."""
    blocks = [_FRAME.findall(block) for block in re.split(r"\n\n", text)]
    if not blocks or not blocks[-1]:
        return False
    if "/threading.py" in blocks[-1][0][0]:
        return any(map(_collective, blocks))
    return _collective(blocks[-1])


def _collective(frames: list[tuple[str, str, str]]) -> bool:
    """Whether a stack ends in a collective, or in the one place where a step waits for its device.

    A device waits in a collective of NCCL's.
    """
    file, _, name = next((f for f in frames if not any(route in f[0] for route in _ROUTES)), ("", "", ""))
    return "/torch/distributed/" in file or (file.endswith(_FOR_DEVICE) and name == to_host.__name__)


def _told(text: str, pid: int) -> str:
    """The position of the main thread: its innermost frame outside torch and the standard library, if any."""
    frames = _FRAME.findall(text.split("\n\n")[-1])
    if not frames:
        return "it does not answer" + (", it waits for a disk or a device" if _state(pid) == "D" else "")
    library = (os.path.dirname(threading.__file__) + os.sep,)
    own = [f for f in frames if "/site-packages/" not in f[0] and not f[0].startswith((*library, "<"))]
    file, line, name = (own or frames)[0]
    return f"it is at {file}:{line}, in {name}"
