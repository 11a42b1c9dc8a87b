"""Over device matrices, too, a rank holds at the peak of a step what the plan says."""

from __future__ import annotations

from itertools import product
from typing import Any

from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parallel.cost.test_memory_meter import rank_peaks
from tests.parity import job
from tests.ranks import on_ranks
from tests.tiers import some

MODEL = {"name": "lm", "vocab_size": 256, "dim": 128, "layers": 4, "heads": 4}
TOKENS = {"name": "random_tokens", "vocab_size": 256, "seq_len": 64}
LEVELS = ("unsharded", "level1", "level2", "level3")
PIPELINES: dict[str, dict[str, Any]] = {
    "one stage": {"micro_batch_num": 2},
    "1f1b": {"stages": 2, "micro_batch_num": 4},
    "interleaved": {"stages": 2, "interleave": True, "micro_batch_num": 4},
}
COLUMNS = [["y", None, None], ["x", None]]
"""A layout of a matrix product: samples over y, columns of the weight over x."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "samples": {"layers.*.mlp.*": [["x", None, None], [None, None]], "head": [["x", None, None], ["y", None]]},
    "columns": {"layers.*.attn.*": COLUMNS, "layers.*.mlp.*": COLUMNS},
    "norms": {"layers.*.*norm*": [["y", None, "x"], ["x"]], "layers.*.mlp.*": COLUMNS},
}  # fmt: skip
CASES = list(product(PIPELINES, LEVELS, ("fp32", "bf16"), STRATEGIES))


def layout(pipeline: str, level: str, precision: str, strategy: str) -> Job:
    """Return a job on 4 ranks."""
    matrix = [2, 2] if pipeline == "one stage" else [2, 1]
    operators = {key: {"matrix": matrix, "axes": ["x", "y"], "in": dims} for key, dims in STRATEGIES[strategy].items()}
    parallel: dict[str, Any] = {"pipeline": PIPELINES[pipeline], "operators": operators}
    if level != "unsharded":
        parallel["hsdp"] = {"threshold": 1, "optimizer_level": level}
    train = {"steps": 1, "batch_size": 16, "precision": precision}
    return job(model=MODEL, data=TOKENS, parallel=parallel, train=train, launch__nproc=4)


def test_planned_bytes_of_every_rank_are_within_10_percent_of_measured() -> None:
    cases = some(CASES, one_in=24)
    jobs = [layout(*case) for case in cases]
    plans = [plan_job(j) for j in jobs]
    ranks = on_ranks(4, rank_peaks, list(zip(jobs, plans, strict=True)), timeout_s=300)
    errors = {
        case: [m.total / r[at] - 1 for m, r in zip(plan.estimate.memory, ranks, strict=True)]
        for at, (case, plan) in enumerate(zip(cases, plans, strict=True))
    }
    said = {case: [f"{e:+.1%}" for e in found] for case, found in errors.items()}
    assert all(abs(e) <= 0.1 for found in errors.values() for e in found), said
