"""Law 6 on devices: loss, norm and every gradient of a layout are those of the plain model on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from tests.fake_accelerator.on_devices.processes import apart, on_devices
from tests.gpu import rank_work
from tests.parity import TOLERANCE, Run, Step, alone, job
from tests.parity.reference import Outcome

SCHEDULES: dict[str, dict[str, Any]] = {
    "single": {},
    "gpipe": {"stages": 2, "scheduler": "gpipe"},
    "1f1b": {"stages": 2, "micro_batch_num": 4},
    "interleaved": {"stages": 2, "interleave": True, "micro_batch_num": 4},
    "zero_bubble_h1": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4},
    "zero_bubble_v": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4},
    "dualpipe_v": {"stages": 2, "scheduler": "dualpipe_v"},
    "seqpipe": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2, "micro_batch_num": 4},
}
DATA: dict[str, dict[str, Any]] = {
    "plain": {},
    "replicas": {"grid": {"dp_replicate": 2}},
    **{f"level{n}": {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": f"level{n}"}} for n in (1, 2, 3)},
}
COLUMN, ROW = {"weight": ["tp", None]}, {"weight": [None, "tp"]}
TP = {
    "layers.*.attn.[qkv]": COLUMN,
    "layers.*.attn.o": ROW,
    "layers.*.mlp.gate": COLUMN,
    "layers.*.mlp.up": COLUMN,
    "layers.*.mlp.down": ROW,
}
RECOMPUTE: dict[str, Any] = {
    "": None,
    "full": {"modules": "layers.*"},
    "selective": {"modules": "layers.*", "policy": "selective"},
}

VALUES: tuple[tuple[Any, ...], ...] = (
    (*SCHEDULES,), (*DATA,), (False, True), (False, True), (*RECOMPUTE,), ("fp32", "fp64"),
)  # fmt: skip
"""The values of each column of ``ROWS``: schedule, data, tp, tied, recompute, precision."""
PLAINEST = ("single", "plain", False, False, "", "fp64")
Pair = tuple[int, Any, int, Any]
"""Two columns, with a value for each."""

ROWS = (
    ("single", "plain", False, True, "full", "fp32"),
    ("single", "replicas", True, False, "selective", "fp64"),
    ("single", "level1", True, True, "", "fp64"),
    ("single", "level2", False, False, "full", "fp64"),
    ("single", "level3", True, True, "full", "fp64"),
    ("gpipe", "plain", True, True, "selective", "fp64"),
    ("gpipe", "level1", False, False, "full", "fp32"),
    ("1f1b", "replicas", False, True, "full", "fp64"),
    ("1f1b", "level2", False, True, "selective", "fp64"),
    ("1f1b", "level3", False, False, "", "fp32"),
    ("1f1b", "plain", True, False, "full", "fp64"),
    ("interleaved", "level1", False, True, "selective", "fp64"),
    ("interleaved", "level3", False, True, "", "fp64"),
    ("interleaved", "plain", True, False, "", "fp32"),
    ("zero_bubble_h1", "level1", False, True, "", "fp64"),
    ("zero_bubble_h1", "replicas", False, False, "", "fp32"),
    ("zero_bubble_v", "level2", False, True, "", "fp32"),
    ("zero_bubble_v", "plain", True, False, "", "fp64"),
    ("dualpipe_v", "level1", False, False, "", "fp64"),
    ("dualpipe_v", "plain", True, True, "", "fp32"),
    ("seqpipe", "level2", False, False, "", "fp64"),
    ("seqpipe", "plain", True, True, "", "fp64"),
    ("seqpipe", "level3", False, False, "selective", "fp32"),
    ("zero_bubble_h1", "plain", True, False, "full", "fp64"),
    ("gpipe", "replicas", False, False, "", "fp64"),
    ("interleaved", "replicas", False, False, "full", "fp64"),
    ("zero_bubble_h1", "level2", False, False, "selective", "fp64"),
    ("zero_bubble_v", "replicas", False, False, "full", "fp64"),
    ("zero_bubble_v", "level1", False, False, "selective", "fp64"),
    ("dualpipe_v", "replicas", False, False, "full", "fp64"),
    ("dualpipe_v", "level2", False, False, "selective", "fp64"),
    ("seqpipe", "replicas", False, False, "full", "fp64"),
    ("single", "level2", True, False, "", "fp64"),
    ("gpipe", "level2", False, False, "", "fp64"),
    ("gpipe", "level3", False, False, "", "fp64"),
    ("1f1b", "level1", False, False, "", "fp64"),
    ("interleaved", "level2", False, False, "", "fp64"),
    ("seqpipe", "level1", False, False, "", "fp64"),
)


def cell(schedule: str, data: str, tp: bool, tied: bool, recompute: str, precision: str) -> Job:
    parallel = {"pipeline": SCHEDULES[schedule], "recompute": RECOMPUTE[recompute], **DATA[data]}
    if tp:
        parallel |= {"grid": {"tp": 2} | parallel.get("grid", {}), "operators": TP}
    layers = 4 if SCHEDULES[schedule] else 2
    return job(parallel=parallel, model__tied=tied, model__layers=layers, train__precision=precision)


@cache
def runs_of_rows() -> Mapping[tuple[Any, ...], Run]:
    """The runs are planned in one child process; the ranks are started once per world size."""
    jobs = {row: cell(*row) for row in ROWS}
    plans, wants = apart(expected, jobs)
    steps: dict[tuple[Any, ...], list[Step]] = {}
    for size in sorted({plan.sizes.grid.size for plan in plans.values()}):
        mine = {row: (jobs[row], plan) for row, plan in plans.items() if plan.sizes.grid.size == size}
        ranks = on_devices(size, one_step_each, mine)
        steps |= {row: [rank[row] for rank in ranks] for row in mine}
    return {row: Run(plans[row], steps[row], wants[row]) for row in ROWS}


def expected(jobs: Mapping[Any, Job]) -> tuple[dict[Any, Plan], dict[Any, Outcome]]:
    plans = {row: plan_job(j) for row, j in jobs.items()}
    return plans, {row: alone(j, plans[row]) for row, j in jobs.items()}


def one_step_each(world: Any, cells: Mapping[Any, tuple[Job, Plan]]) -> dict[Any, Step]:
    out = {}
    for row, (j, plan) in cells.items():
        try:
            out[row] = rank_work.one_step(world, j, plan)
        except Exception as error:
            error.add_note(f"in {row}")
            raise
    return out


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(str(word) for word in row))
def test_every_gradient_is_that_of_the_cpu(row: tuple[Any, ...]) -> None:
    runs_of_rows()[row].assert_same()


def pairs(row: tuple[Any, ...]) -> set[Pair]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def planned_pairs(missing: list[Pair]) -> list[Pair]:
    """The pairs that the planner accepts when all other settings are the plainest."""
    out = []
    for i, first, j, second in missing:
        row = list(PLAINEST)
        row[i], row[j] = first, second
        try:
            plan_job(cell(*row))
        except RequestError:
            continue
        out.append((i, first, j, second))
    return out


def test_every_pair_of_values_that_is_not_refused_is_in_a_row() -> None:
    columns = combinations(enumerate(VALUES), 2)
    every = [(i, a, j, b) for (i, some), (j, others) in columns for a, b in product(some, others)]
    tried = set[Pair]().union(*map(pairs, ROWS))
    missing = [pair for pair in every if pair not in tried]
    assert {(first, second) for _, first, _, second in missing} == {
        (schedule, "level3") for schedule in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
    }
    assert apart(planned_pairs, missing) == []


def test_every_compared_precision_has_a_tolerance() -> None:
    assert {row[-1] for row in ROWS} == TOLERANCE.keys()
