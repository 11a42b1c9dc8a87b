"""``parallel.recompute: auto`` takes the cheapest of all choices that fit, by the planner's own bytes."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.recompute_auto import blocks, with_policies
from launcher.plan.show.text import text
from launcher.plan.values.text import GB
from launcher.planner.plan_job import plan_job
from tests.parity import job
from tests.tiers import ALL, some

MODEL = {"name": "lm", "vocab_size": 256, "dim": 64, "layers": 4, "heads": 4}
TOKENS = {"name": "random_tokens", "vocab_size": 256, "seq_len": 64}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage": {"micro_batch_num": 2},
    "1f1b": {"stages": 2, "micro_batch_num": 4},
    "interleaved": {"stages": 2, "interleave": True, "micro_batch_num": 4},
    "zero_bubble_h1": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4},
    "dualpipe_v": {"stages": 2, "scheduler": "dualpipe_v", "micro_batch_num": 4},
    "seqpipe": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2, "micro_batch_num": 4},
}


TRIED = ["one stage", "zero_bubble_h1", *(["seqpipe"] if ALL else []), "1f1b"]


def job_with_memory(layout: str, room: float | None, layers: int = 4, **recompute: Any) -> Job:
    return job(
        model=MODEL | {"layers": layers}, data=TOKENS, train={"steps": 1, "batch_size": 16, "precision": "fp32"},
        parallel={"pipeline": LAYOUTS[layout], "recompute": {"modules": "auto", **recompute}},
        cluster={"memory_gb": None if room is None else room / GB},
    )  # fmt: skip


def most(plan: Plan) -> int:
    return max(m.total for m in plan.estimate.memory)


def price(plan: Plan) -> tuple[int, int]:
    """Return the flops that run again, and the number of modules that run again."""
    return sum(r.flops for r in plan.estimate.rerun), len(plan.recomputed)


def between(layout: str, share: float, layers: int = 4) -> float:
    """Return bytes between those with all blocks recomputed (``share`` 0) and those with none (``share`` 1)."""
    free = job_with_memory(layout, 1e15, layers)
    plain = plan_job(with_policies(free, {}))
    full = plan_job(with_policies(free, dict.fromkeys(blocks(plain), "full")))
    return most(full) + share * (most(plain) - most(full))


@pytest.mark.parametrize(("layout", "share"), some(product(TRIED, [0.3, 0.7, 0.02]), one_in=5))
def test_of_all_choices_that_fit_none_is_cheaper(layout, share):
    room = between(layout, share, layers=3)
    wanted = job_with_memory(layout, room, layers=3, keep=["attention"])
    found = plan_job(wanted)
    assert most(found) <= int(room)
    names = [f"layers.{n}" for n in range(3)]
    every = [dict(zip(names, ways, strict=True)) for ways in product(("none", "selective", "full"), repeat=3)]
    plans = [plan_job(with_policies(wanted, choice)) for choice in every]
    assert price(found) == min(price(plan) for plan in plans if most(plan) <= int(room))


def test_early_ranks_of_1f1b_run_more_again():
    plan = plan_job(job_with_memory("1f1b", between("1f1b", 0.4, layers=8), layers=8))
    stages = {m: s.index for s in plan.stages for m in s.modules}
    count = Counter(stages[r.module] for r in plan.recomputed)
    assert count[0] > count[1]


@pytest.mark.parametrize("layout", some(LAYOUTS))
def test_a_plan_with_auto_recomputation_fits_and_says_so(layout):
    room = between(layout, 0.5)
    plan = plan_job(job_with_memory(layout, room))
    assert plan.recomputed
    assert most(plan) <= room
    assert "fits: " in text(plan)
    notes = [str(n) for n in plan.notes if n.key == "parallel.recompute"]
    assert len(notes) == 1
    assert notes[0].startswith(f"parallel.recompute auto -> {len(plan.recomputed)} of 4 blocks run")


def test_nothing_runs_again_where_everything_fits():
    plan = plan_job(job_with_memory("1f1b", GB))
    assert plan.recomputed == ()
    assert "parallel.recompute auto -> null: no block needs recomputation to fit 1.0 GB" in text(plan)


def test_a_plan_is_that_of_the_policies_it_chose():
    wanted = job_with_memory("1f1b", between("1f1b", 0.5))
    found = plan_job(wanted)
    named = {r.module: r.policy for r in found.recomputed}
    again = plan_job(with_policies(wanted, named))
    assert (again.recomputed, again.estimate) == (found.recomputed, found.estimate)


def refusal(j: Job) -> str:
    with pytest.raises(RequestError) as caught:
        plan_job(j)
    return str(caught.value)


def test_a_memory_that_nobody_knows_is_refused():
    assert refusal(job_with_memory("1f1b", None)) == (
        "parallel.recompute: auto: the memory of a device is unknown; set cluster.memory_gb (try: cluster.memory_gb=80)"
    )


def test_a_step_that_no_recomputation_makes_fit_is_refused_with_a_cure(monkeypatch):
    room = between("one stage", -0.02)
    said = refusal(job_with_memory("one stage", room))
    head = "parallel.recompute: auto: however many blocks run again, a step does not fit: rank 0 needs "
    assert said.startswith(head)
    assert said.endswith("(try: parallel.pipeline.micro_batch_num=4)")
    monkeypatch.setitem(LAYOUTS, "one stage", {"micro_batch_num": 4})
    assert most(plan_job(job_with_memory("one stage", room))) <= room
    assert "try" not in refusal(job_with_memory("one stage", 1000))


def test_policies_are_chosen_not_told():
    with pytest.raises(
        ValueError, match="modules auto chooses the blocks and the policy of each; leave out policy and every"
    ):
        job_with_memory("1f1b", 1, policy="selective")


def test_auto_alone_is_modules_auto():
    short = job(parallel={"recompute": "auto"}).parallel.recompute
    assert short is not None
    assert short.modules == "auto"
