"""Plans that share the traces of their model equal plans that are made alone."""

from __future__ import annotations

from typing import Any

from launcher.job.compose import compose
from launcher.plan.show.plan_json import as_json
from launcher.planner.plan_job import plan_job
from launcher.planner.trace_model import Traces
from tests.parity import job, own

MEGATRON = compose(["operators=megatron"]).job.parallel.operators
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"parallel": {"pipeline": {"stages": 2}}, "launch__nproc": 2},
    {"parallel": {"pipeline": {"stages": 2, "micro_batch_num": 4}}, "launch__nproc": 4},
    {"parallel": {"grid": {"tp": 2}, "operators": MEGATRON}, "launch__nproc": 2},
    {"parallel": {"grid": {"tp": 2}, "operators": MEGATRON}, "launch__nproc": 4, "train__batch_size": 16},
    {"parallel": {"hsdp": {"shard_size": 2, "optimizer_level": "level3"}}, "launch__nproc": 2},
    {"parallel": {"recompute": {"modules": ["layers.0"]}}},
    {"train__precision": "bf16"},
    {"seed": 3},
]  # fmt: skip


def test_plans_are_those_without_traces_in_any_order() -> None:
    traces = Traces()
    alone = [as_json(plan_job(job(**changes))) for changes in LAYOUTS]
    for _ in range(2):
        together = [as_json(plan_job(job(**changes), traces)) for changes in reversed(LAYOUTS)]
        assert together == alone[::-1]


def test_a_class_of_the_users_own_too() -> None:
    traces = Traces()
    jobs = [own("nets.FrozenFirst", ["int64", 5], stages=n, launch__nproc=n) for n in (1, 2, 1)]
    assert [as_json(plan_job(j, traces)) for j in jobs] == [as_json(plan_job(j)) for j in jobs]
