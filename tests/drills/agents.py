"""Two torchrun agents of two ranks: kill -9 or SIGSTOP of a random rank names that rank."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.drills import Tally, children, launched, wait
from tests.ports import free_port

TIMES = 16
TIMEOUT_S = 5
TINY = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64",
    "train.batch_size=16", "parallel.hsdp.threshold=0", "logger=plain", "steps=[train,save]", "checkpoint.every=5",
    "recipe=lm_tied_pp2_hsdp2", "train.steps=4000", "launch.nnodes=2", "launch.nproc=2",
    f"launch.timeout_s={TIMEOUT_S}",
)  # fmt: skip
PATIENCE_S = 90
SAID = {
    signal.SIGKILL: "has died without a message",
    signal.SIGSTOP: f"hung for {TIMEOUT_S} s (launch.timeout_s): it is stopped",
}


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    for n in range(times):
        signum = (signal.SIGKILL, signal.SIGSTOP)[n % 2]
        told = _try(signum, chance, folder / f"{n}")
        tally.note("right" if told == "right" else f"wrong ({signum.name})", "" if told == "right" else told)
    return tally


def _try(signum: signal.Signals, chance: random.Random, folder: Path) -> str:
    port = free_port()
    outer = ("torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1",
             f"--master-port={port}")  # fmt: skip
    logs = [folder.with_suffix(f".{node}.log") for node in (0, 1)]
    words = ("-m", "launcher", *TINY, f"run_dir={folder}")
    with (
        launched(logs[0], *outer, "--node-rank=0", *words) as first,
        launched(logs[1], *outer, "--node-rank=1", *words) as second,
    ):
        if not _trains(folder, first):
            return f"did not start: {logs[0].read_text()[-300:]}"
        time.sleep(chance.uniform(0, 2))
        victim = chance.randrange(4)
        pids = [pid for agent in (first, second) for pid in children(agent.pid)]
        pid = next(p for p in pids if _rank(p) == str(victim))
        os.kill(pid, signum)
        codes = [wait(agent, PATIENCE_S) for agent in (first, second)]
    said = "".join(log.read_text() for log in logs)
    heads = re.findall(r"^error: (.*)$", said, re.MULTILINE)
    if None in codes:
        return f"rank {victim}: still running; {heads}"
    return (
        "right"
        if heads and all(h.startswith(f"rank {victim} {SAID[signum]}") for h in heads)
        else f"rank {victim}: {heads}"
    )


def _trains(folder: Path, process: subprocess.Popen[str]) -> bool:
    end_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_at and process.poll() is None:
        if (folder / "checkpoints/latest").exists():
            return True
        time.sleep(0.05)
    return False


def _rank(pid: int) -> str | None:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((w[5:].decode() for w in words if w.startswith(b"RANK=")), None)
