"""TERM, USR1, USR2, HUP, QUIT, INT to launcher, ranks or all at random moments: saved, code 75 or 130, resumes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from tests.drills import Tally, below, launched, ranks, wait

TIMES = 36
TINY = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64",
    "train.batch_size=16", "parallel.hsdp.threshold=0", "logger=plain", "steps=[train,evaluate,save]",
    "train.eval_every=7", "recipe=lm_tied_pp2_hsdp2", "train.steps=60",
)  # fmt: skip
OURS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m")
HOW = ("launcher", "rank", "ranks", "group", "torchrun", "torchrun's ranks")
PATIENCE_S = 90


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    straight = folder / "straight"
    with launched(straight.with_suffix(".log"), "launcher", *TINY, f"run_dir={straight}") as process:
        assert wait(process, PATIENCE_S) == 0
    for n in range(times):
        how = HOW[n % len(HOW)]
        outcome = _try(how, chance, folder / f"{n}", straight)
        tally.note(
            outcome if outcome in ("right", "over") else f"wrong ({how})",
            "" if outcome in ("right", "over") else outcome,
        )
    return tally


def _try(how: str, chance: random.Random, folder: Path, straight: Path) -> str:
    torchrun = how.startswith("torchrun")
    signum = chance.choice(RANKS if "rank" in how else (signal.SIGTERM, signal.SIGINT) if torchrun else OURS)
    words = (*(TORCHRUN if torchrun else ()), "launcher", *TINY, f"run_dir={folder}")
    log = folder.with_suffix(".log")
    with launched(log, *words) as process:
        if not _begun(folder, log, process.pid):
            return f"{signum.name}: did not start"
        time.sleep(chance.uniform(0, 2.5))
        _send(how, process.pid, signum, chance)
        code = wait(process, PATIENCE_S)
        left = below(process.pid)
    said = log.read_text().splitlines()
    if code == 0:
        return "over"
    if code is None or left:
        return f"{signum.name}: still running: {said[-1:]}"
    status = json.loads((folder / "status.json").read_text())
    want = 1 if torchrun else 130 if signum == signal.SIGINT else 75
    if code != want or status["status"] != "preempted":
        return f"{signum.name}: exit code {code}, {status['status']}: {status.get('error')} {said[-1:]}"
    with launched(log, "launcher", *TINY, f"run_dir={folder}") as process:
        if wait(process, PATIENCE_S) != 0:
            return f"{signum.name}: does not go on: {log.read_text().splitlines()[-1:]}"
    other = set(_rows(folder)) ^ set(_rows(straight))
    return f"{signum.name}: other numbers: {sorted(other, key=str)[:4]}" if other else "right"


def _begun(folder: Path, log: Path, pid: int) -> bool:
    end_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_at:
        if (folder / "status.json").exists() and ranks(pid):
            return True
        time.sleep(0.02)
    return False


def _send(how: str, pid: int, signum: signal.Signals, chance: random.Random) -> None:
    if how in ("launcher", "torchrun"):
        os.kill(pid, signum)
    elif how == "group":
        os.killpg(pid, signum)
    elif pids := ranks(pid):
        for rank in [chance.choice(pids)] if how == "rank" else pids:
            try:
                os.kill(rank, signum)
            except ProcessLookupError:
                return


def _rows(folder: Path) -> list[tuple[int, float | None, float | None]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get("loss"), row.get("val_loss")) for row in rows]
