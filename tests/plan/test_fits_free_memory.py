from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.job.schema.job import Job
from launcher.plan.fits_free_memory import PROCESS, Fit, Free, fit, least, problems
from launcher.plan.lighter_layouts import lighter
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from tests.plan.made import job

SMALL = ("data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "data.samples=64", "model.dim=32",
         "train.batch_size=32", "steps=[train]")  # fmt: skip
GB = 1 << 30


def planned_job(*overrides: str) -> tuple[Job, Plan]:
    wanted = job(*SMALL, *overrides)
    return wanted, plan_job(wanted)


def memory_fit(*overrides: str, ranks: Sequence[int], free: Free, besides: dict[int, int] | None = None) -> Fit:
    fitting = fit(*planned_job(*overrides), ranks, free, besides or {})
    assert fitting is not None
    return fitting


def test_all_ranks_of_a_machine_share_its_memory_with_what_each_is_itself() -> None:
    wanted, plan = planned_job("launch.nproc=2")
    total = sum(m.total for m in plan.estimate.memory)
    assert memory_fit("launch.nproc=2", ranks=(0, 1), free=Free(GB)) == Fit(
        total + 2 * PROCESS, GB, "this machine", (0, 1)
    )
    assert fit(wanted, plan, (1,), Free(GB), {1: 7}) == Fit(
        plan.estimate.memory[1].total + 7 + PROCESS, GB, "this machine", (1,)
    )


@pytest.mark.parametrize(("off", "fits"), [(0, True), (-1, False)], ids=["to the byte", "a byte too few"])
def test_a_plan_fits_if_the_free_memory_is_at_least_its_bytes(off: int, fits: bool) -> None:
    needed = planned_job()[1].estimate.memory[0].total + PROCESS
    assert memory_fit(ranks=(0,), free=Free(needed + off)).fits is fits


def test_each_device_is_for_one_rank_and_the_fullest_is_told() -> None:
    free = Free(0, devices=(4 * GB, 2 * GB), kind="npu")
    assert memory_fit("launch.nproc=2", ranks=(0, 1), free=free).where == "npu:1"
    wanted, plan = planned_job("launch.nproc=2")
    tight = Fit(plan.estimate.memory[0].total, 1000, "npu:0", (0,))
    assert fit(wanted, plan, (0, 1), Free(0, devices=(1000, GB), kind="npu"), {}) == tight


def test_without_training_a_rank_holds_its_weights_alone() -> None:
    plan = planned_job()[1]
    assert memory_fit("steps=[evaluate]", ranks=(0,), free=Free(GB)).needed == plan.estimate.memory[0].params + PROCESS


def test_a_constructor_that_makes_the_whole_model_on_each_rank_needs_room_for_it() -> None:
    few = ("parallel.pipeline.stages=2", "launch.nproc=2", "steps=[evaluate]")
    lean, whole = (
        memory_fit(*few, f"parallel.deferred_init={d}", ranks=(0,), free=Free(GB)) for d in ("true", "false")
    )
    weights = sum(p.spec.nbytes for p in planned_job()[1].params)
    assert whole.needed - lean.needed == weights


def test_steps_that_do_not_make_the_model_of_the_plan_are_not_compared() -> None:
    assert fit(*planned_job("steps=[certify]"), (0,), Free(0), {}) is None
    assert fit(*planned_job(), (), Free(0), {}) is None


def test_no_layout_needs_less_than_one_copy_of_the_state() -> None:
    wanted, plan = planned_job("launch.nproc=2")
    weights = sum(p.spec.nbytes for p in plan.params)
    assert least(wanted, plan, (0, 1)) == 4 * weights + 2 * PROCESS
    for change in lighter(wanted, plan):
        lean = fit(change.applied_to(wanted), plan_job(change.applied_to(wanted)), (0, 1), Free(0), {})
        assert lean is not None
        assert lean.needed >= least(wanted, plan, (0, 1))


@pytest.mark.parametrize(("overrides", "words"), [
    ((), ["parallel.pipeline.micro_batch_num=2", "parallel.pipeline.micro_batch_num=4",
          "parallel.pipeline.micro_batch_num=8"]),
    (("launch.nproc=2", "train.batch_size=4"), [
        "parallel.hsdp.shard_size=-1",
        "parallel.hsdp.shard_size=-1 parallel.hsdp.optimizer_level=level3",
        "parallel.pipeline.micro_batch_num=2",
        "parallel.hsdp.shard_size=-1 parallel.hsdp.optimizer_level=level3 parallel.pipeline.micro_batch_num=2",
    ]),
    (("launch.nproc=2", "train.batch_size=2", "parallel.hsdp.shard_size=-1"),
     ["parallel.hsdp.optimizer_level=level3"]),
    (("launch.nproc=2", "train.batch_size=2", "parallel.hsdp.optimizer_level=level3"), []),
    (("parallel.pipeline.loss_reduction=sum",), []),
], ids=["one rank", "copies", "level1", "level3", "a sum"])  # fmt: skip
def test_lighter_layouts_are_tried_from_little_to_much(overrides: tuple[str, ...], words: list[str]) -> None:
    wanted, plan = planned_job(*overrides)
    changes = list(lighter(wanted, plan))
    assert [c.words for c in changes] == words
    assert [c.applied_to(wanted).parallel for c in changes] == [
        job(*SMALL, *overrides, *c.words.split()).parallel for c in changes
    ]


@pytest.mark.parametrize(("found", "text"), [
    (Fit(12026 << 20, 23962 << 20, "this machine", (0,)), "fits: 11.7 of 23.4 GB free on this machine"),
    (Fit(12 << 20, 23962 << 20, "cuda:0", (0,)), "fits: 12.0 MB of 23.4 GB free on cuda:0"),
    (Fit(9 << 40, 23962 << 20, "this machine", (0, 1, 2, 3)),
     "does not fit: ranks 0-3 need 9.0 TB, 23.4 GB are free on this machine"),
    (Fit(9 << 40, 0, "cuda:3", (7,)), "does not fit: rank 7 needs 9.0 TB, 0 B are free on cuda:3"),
], ids=["fits", "by far", "not", "not on a device"])  # fmt: skip
def test_the_comparison_with_free_memory_is_printed(found: Fit, text: str) -> None:
    assert str(found) == text
    problem = problems(found, "parallel.hsdp.shard_size=-1")
    assert str(problem) == (
        f"launch.check_memory: {text}; launch.check_memory=false starts it anyway (try: parallel.hsdp.shard_size=-1)"
    )
