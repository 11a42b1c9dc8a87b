"""Small files of a run changed at random (bits, bytes, lines, pieces): each is refused, or reads as it was written.

If the newest checkpoint is damaged, the one before it is used.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.checkpoint import latest, open_checkpoint, read_extra
from launcher.errors import RequestError
from launcher.runtime.run_folder import read_status
from tests.drills import Tally, launched, wait

TIMES = 6000
WORDS = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64",
    "train.batch_size=16", "parallel.hsdp.threshold=0", "logger=plain", "steps=[train,save]", "checkpoint.every=2",
    "checkpoint.keep=null", "recipe=lm_tied_pp2_hsdp2", "train.steps=6",
)  # fmt: skip
LAST = "checkpoints/step-000006"
FILES = (
    f"{LAST}/manifest.json", f"{LAST}/manifest.json", f"{LAST}/manifest.json", "checkpoints/latest", "status.json",
    f"{LAST}/state.json", f"{LAST}/strategy/stage0.json", f"{LAST}/strategy/stage1.json",
)  # fmt: skip
PATIENCE_S = 120


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    run_dir = folder / "run"
    with launched(folder / "log", "launcher", *WORDS, f"run_dir={run_dir}") as process:
        assert wait(process, PATIENCE_S) == 0, (folder / "log").read_text()
    truth = {
        step: state_of_checkpoint(run_dir, run_dir / "checkpoints" / step) for step in ("step-000004", "step-000006")
    }
    before = {name: (run_dir / name).read_bytes() for name in FILES}
    for _ in range(times):
        name = chance.choice(FILES)
        how, data = changed(before[name], chance)
        (run_dir / name).write_bytes(data)
        try:
            newest = latest(run_dir / "checkpoints")
            assert newest is not None, "no checkpoint is whole"
            found = state_of_checkpoint(run_dir, newest)
        except (ValueError, RequestError):
            outcome = "right"
        else:
            led = newest.name != "step-000006" and not name.startswith(LAST)  # another checkpoint than the intended one
            outcome = "right" if found == truth[newest.name] and not led else f"wrong ({name}, {how})"
        tally.note(outcome, "" if outcome == "right" else repr(data[:200]))
        (run_dir / name).write_bytes(before[name])
    shutil.rmtree(run_dir)
    return tally


def state_of_checkpoint(run_dir: Path, folder: Path) -> Any:
    """Return all that a start from ``folder`` depends on: its files, strategy, state, random streams and status."""
    checkpoint = open_checkpoint(folder)
    streams = [
        {n: b.data.tobytes() for n, b in read_extra(checkpoint, rank).items()}
        for rank in range(checkpoint.manifest.world)
    ]
    return checkpoint.manifest.files, checkpoint.strategy, checkpoint.state, streams, read_status(run_dir)


def changed(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    change = chance.choice(CHANGES)
    return change.__name__, change(data, chance)


def bit(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def byte(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def less(data: bytes, chance: random.Random) -> bytes:
    at, n = chance.randrange(len(data)), chance.choice((1, 1, 8, 100))
    return data[:at] + data[at + n :]


def more(data: bytes, chance: random.Random) -> bytes:
    at, n = chance.randrange(len(data)), chance.choice((1, 8, 100))
    return data[:at] + data[at : at + n] + data[at:]


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def zeros(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]


def lines(data: bytes, chance: random.Random) -> bytes:
    """Remove a line, double it, or replace it by another."""
    rows = data.split(b"\n")
    at, other = chance.randrange(len(rows)), chance.randrange(len(rows))
    rows[at : at + 1] = chance.choice(([], [rows[at]] * 2, [rows[other]]))
    return b"\n".join(rows)


def ranks(data: bytes, chance: random.Random) -> bytes:
    """Name another rank in a path."""
    return data.replace(b"rank_%d/" % chance.randrange(4), b"rank_%d/" % chance.randrange(4), chance.choice((1, -1)))


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    bit,
    bit,
    bit,
    byte,
    less,
    more,
    cut,
    zeros,
    lines,
    ranks,
)
