"""KILL or HUP to a sweep, KILL to a cell or a rank of it, at random moments: nothing is lost, repeated or orphaned."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from tests.drills import Tally, below, children, launched, wait

TIMES = 30
WORDS = (
    "recipe=lm_single", "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8",
    "data.samples=64", "train.batch_size=16", "logger=plain", "steps=[train,save]", "train.steps=300",
    "checkpoint.every=100", "optim.lr=1e-3,1e-2,1e-1", "sweep.parallel=2",
)  # fmt: skip
PATIENCE_S = 120


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    for n in range(times):
        target, signum = TARGETS[n % len(TARGETS)]
        told = _try(target, signum, chance, folder / f"{n}")
        tally.note(
            "right" if told == "right" else "wrong", "" if told == "right" else f"{signum.name} {target}: {told}"
        )
    return tally


TARGETS = (
    ("sweep", signal.SIGKILL), ("cell", signal.SIGKILL), ("rank", signal.SIGKILL), ("sweep", signal.SIGHUP),
)  # fmt: skip


def _try(target: str, signum: signal.Signals, chance: random.Random, folder: Path) -> str:
    words = ("launcher", "-m", f"sweep_dir={folder}", *WORDS)
    log = folder.with_suffix(".log")
    with launched(log, *words) as process:
        while not below(process.pid) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 8))
        all_of_it = below(process.pid)
        _kill(target, signum, process.pid, chance)
        if wait(process, PATIENCE_S) is None:
            return "the sweep still runs"
        with launched(log, *words) as again:  # at once
            if wait(again, PATIENCE_S) != 0:
                return f"the second sweep failed: {log.read_text()[-300:]}"
            if left := [pid for pid in all_of_it if Path(f"/proc/{pid}").exists()]:
                return f"orphans: {left}"
    for cell in json.loads((folder / "sweep.json").read_text()):
        rows = [json.loads(line) for line in (folder / cell / "metrics.jsonl").read_text().splitlines()]
        if [row["step"] for row in rows] != list(range(1, 301)):
            return f"{cell}: its steps are not one run's"
    return "right"


def _kill(target: str, signum: signal.Signals, sweep: int, chance: random.Random) -> None:
    """Signal a random one of the target's processes, if there is any."""
    cells = children(sweep)
    found = {"sweep": [sweep], "cell": cells, "rank": [rank for cell in cells for rank in below(cell)]}[target]
    if found:
        try:
            os.kill(chance.choice(found), signum)
        except ProcessLookupError:  # it has just ended
            return
