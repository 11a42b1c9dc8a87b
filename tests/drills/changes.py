"""A run resumes with one setting changed: changes of the numbers are refused or noted, others give the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
from pathlib import Path

from launcher.__main__ import main
from launcher.plan.may_change_on_resume import class_of
from tests.drills import Tally

BASE = (
    "recipe=lm_tied_pp2_hsdp2", "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64",
    "data.seq_len=8", "data.samples=64", "train.batch_size=16", "parallel.hsdp.threshold=0", "logger=plain",
    "steps=[train,save]", "schedule.warmup_steps=1", "train.precision=fp64",
)  # fmt: skip
CHANGES = (
    "seed=1", "train.batch_size=8", "data.seq_len=4", "data.samples=32", "model.rope_theta=10", "model.norm_eps=0.1",
    "debug.overfit=16", "optim.lr=0.1", "optim.weight_decay=0", "optim.betas=[0.5,0.6]", "optim.eps=0.1",
    "train.clip_norm=0.01", "schedule=constant", "schedule.final=0.9", "schedule.warmup_steps=6", "train.steps=9",
    "parallel.pipeline.loss_reduction=sum", "parallel.gradients_mean=false", "parallel.pipeline.micro_batch_num=4",
    "parallel.pipeline.scheduler=gpipe", "parallel.pipeline.stages=1", "parallel.hsdp.shard_size=1",
    "parallel.hsdp.optimizer_level=level3", "parallel.comm_fusion.openstate=false", "launch.nproc=8",
    "parallel.dataset_strategy=full_batch", "parallel.pipeline.stage_config=auto", "train.log_every=1", "name=other",
    "deterministic=true", "checkpoint.keep=1", "train.eval_every=1", "parallel.fp32_communication=true",
)  # fmt: skip
TIMES = len(CHANGES)
CLOSE = 1e-9  # for fp64 losses in another layout, after the gradients of two steps


def run(times: int, chance: random.Random, folder: Path) -> Tally:
    tally = Tally()
    straight = folder / "straight"
    assert _start(straight, "train.steps=6", "checkpoint.every=2", "checkpoint.keep=null")[0] == 0
    for n, change in enumerate(chance.sample(CHANGES, times) if times < len(CHANGES) else CHANGES):
        told = _try(change, folder / f"{n}", straight)
        tally.note("right" if told == "right" else f"wrong ({change})", "" if told == "right" else told)
    return tally


def _try(change: str, folder: Path, straight: Path) -> str:
    key = change.partition("=")[0]
    # the words of a later start, with the change last
    words = [f"checkpoint.resume={straight}/checkpoints/step-000002", "train.steps=6", change]
    code, said = _start(folder, *words)
    told = code == 2 and " was trained with " in said
    if told and folder.exists():
        return "refused, and yet something was written"
    if told:
        code, said = _start(folder, *words, f"checkpoint.accept_changes=[{key}]")
    if code:
        return f"exit code {code}: {said[-300:]}"
    told = told or ": since step-000002" in said.replace("\n              ", " ").replace(": since\n", ": since ")
    same = _same(_losses(folder), _losses(straight)[2:])
    free = key not in ("schedule",) and set(class_of(key)) <= {"layout", "aside"}
    if not same and not told:
        return f"{change}: other numbers, and nothing was said"
    if free and (told or not same):
        return f"{change}: should be free: told {told}, the same numbers {same}"
    return "right"


def _start(folder: Path, *words: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*BASE, f"run_dir={folder}", *words])
    return code, said.getvalue()


def _losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def _same(some: list[float], others: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(some, others, strict=False))
