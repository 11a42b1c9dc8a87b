"""Complete runs for tests: small requests, run in this process or in their own, and the files that they leave."""

from __future__ import annotations

import gzip
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

from launcher.__main__ import main
from launcher.runtime.run_folder import read_status, write_status
from tests.forked import python

ROOT = Path(__file__).parents[2]
BATCH = "steps.evaluate.batches=1"
TINY = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64",
    "train.batch_size=16", "parallel.hsdp.threshold=0", "parallel.pipeline.micro_batch_num=2", "logger=plain",
    "steps=[train,save]",
)  # fmt: skip
"""The default recipe (2 stages x 2-way HSDP, tied) at a size where a step takes milliseconds."""


def run(folder: Path, *overrides: str, steps: int = 4) -> Path:
    """Run a request in this process, check that it succeeds, and return its folder."""
    assert main([*TINY, f"run_dir={folder}", f"train.steps={steps}", *overrides]) == 0
    return folder


def shape(**sizes: int) -> list[str]:
    """The overrides of a layout: ``pp``, ``shard``, ``replicate``."""
    pp, shard, replicate = sizes.get("pp", 1), sizes.get("shard", 1), sizes.get("replicate", 1)
    return [
        f"parallel.pipeline.stages={pp}", f"launch.nproc={pp * shard * replicate}",
        f"parallel.hsdp={{shard_size: {shard}, threshold: 0}}",
    ]  # fmt: skip


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    """Return the steps in ``metrics.jsonl``, in order."""
    return [row["step"] for row in metrics(folder) if "loss" in row]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank's profile, in Chrome's format."""
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    assert found
    return found


def status(folder: Path) -> dict[str, Any]:
    found = read_status(folder)
    assert found is not None
    return found


def say(folder: Path, **changes: Any) -> None:
    """Change the status of a run."""
    write_status(folder, **status(folder) | changes)


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").glob("step-*"))


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of every tensor file of a checkpoint: weights, optimizer state, random streams."""
    where = folder / "checkpoints" / f"step-{step:06d}"
    found = {str(p.relative_to(where)): p.read_bytes() for p in sorted(where.glob("rank_*/*.safetensors"))}
    assert found
    return found


@contextmanager
def child(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run ``python -m WORDS`` in the checkout; it is killed at the end of the block."""
    if words[0] == "launcher":
        start = partial(python, *words)
    else:  # torchrun, whose own children are fresh interpreters
        start = partial(subprocess.Popen, [sys.executable, "-m", *words], cwd=ROOT, text=True, start_new_session=True)
    with start(**options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def started(folder: Path, *overrides: str, steps: int) -> Iterator[subprocess.Popen[str]]:
    """Start a run in its own process, with its output in ``folder.log``."""
    words = [*TINY, f"run_dir={folder}", f"train.steps={steps}", *overrides]
    with folder.with_suffix(".log").open("w") as log, child(["launcher", *words], stdout=log, stderr=log) as process:
        yield process


def torchrun(n: int, *words: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``launcher WORDS`` on ``n`` ranks that torchrun starts."""
    outer = ["torch.distributed.run", "--standalone", f"--nproc-per-node={n}", f"--max-restarts={restarts}", "-m"]
    with child([*outer, "launcher", *words], stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def until(done: Callable[[], bool], process: subprocess.Popen[str], within_s: float = 300) -> None:
    """Wait until ``done`` returns true; fail if the process ends first."""
    end = time.monotonic() + within_s
    while not done():
        assert process.poll() is None, "it ended first"
        assert time.monotonic() < end, "it takes too long"
        select.select([], [], [], 0.005)


def reached(folder: Path, step: int) -> Callable[[], bool]:
    """Return a function that says whether the run has written the metrics of ``step``."""
    return lambda: (folder / "metrics.jsonl").exists() and any(s >= step for s in complete_steps(folder))


def complete_steps(folder: Path) -> list[int]:
    """Return the same as ``steps``, but ignore a last line that is still being written."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text[: text.rfind("\n") + 1].splitlines()]


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the ranks in rank order: grandchildren of the server that the launcher forked."""
    found = [process.pid]
    for _ in ("the server", "the parent of ranks", "ranks"):
        found = [child for pid in found for child in children(pid)]
    return found


def children(pid: int) -> list[int]:
    """Return the ids of the child processes, none if the process has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def ended(pid: int, within_s: float) -> bool:
    """Whether a process has ended, or ends within the given seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready = select.poll()  # select() takes no file descriptor above 1023
        ready.register(fd, select.POLLIN)
        return bool(ready.poll(within_s * 1000))
    finally:
        os.close(fd)


def last(folder: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return folder / "checkpoints" / checkpoints(folder)[-1]
