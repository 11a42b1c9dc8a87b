"""What a rank that runs out of memory says about its device, and which layout with less memory it proposes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher.errors import RunError
from launcher.job.compose import compose
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.values.text import GB
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import OutOfMemory, failed, raised
from launcher.steps.model.out_of_memory import InUse, cure, explained, overhead
from tests.parity import job

HERE = World(0, 1, 0, 1, 0, "cpu", "gloo")
FULL = InUse("cuda:0", total=80 * GB, free=GB // 2, tensors=74 * GB, kept=3 * GB, requested=2 * GB)
LM = ["recipe=lm_single", "data=random_tokens", "train.batch_size=16", "steps=[train]"]


def test_room_is_what_this_rank_has_and_what_is_free() -> None:
    assert FULL.others == 80 * GB - GB // 2 - 77 * GB
    assert FULL.room == 77 * GB + GB // 2
    assert FULL.missing == 1  # the free memory is fragmented: in one piece it would have fitted
    tight = replace(FULL, kept=GB, requested=4 * GB)
    assert tight.missing == 4 * GB - GB - GB // 2


def proposed(missing: int, *words: str) -> tuple[str, int, int]:
    """Return the proposal if so many bytes are missing, and the planned bytes with it and without it."""
    asked = compose([*LM, *words]).job
    plan = plan_job(asked)
    found = cure(replace(FULL, tensors=GB, kept=0, free=0, requested=missing), 0, asked, plan)
    assert found is not None
    pasted = plan_job(compose([*LM, *words, *found.words.split(" ")]).job)
    assert pasted.estimate.memory[0].total == found.planned
    return found.words, found.planned, plan.estimate.memory[0].total


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), "parallel.recompute=auto cluster.memory_gb="),
        (("parallel.recompute={modules: layers.*}",), "parallel.pipeline.micro_batch_num="),
        (
            ("launch.nproc=2", "parallel.recompute={modules: layers.*}"),
            "parallel.hsdp.shard_size=-1",
        ),
    ],
    ids=["recompute", "smaller micro batches", "shards"],
)
def test_the_proposed_cure_is_accepted_and_saves_the_missing_bytes(words: tuple[str, ...], kind: str) -> None:
    missing = 2 << 20
    said, lighter, planned = proposed(missing, *words)
    assert said.startswith(kind)
    assert lighter <= planned - missing


def test_a_policy_that_the_user_has_chosen_is_kept() -> None:
    said, _, _ = proposed(1 << 20, "parallel.recompute={modules: layers.*, policy: selective}")
    assert "recompute" not in said


def test_the_proposed_cure_has_room_for_the_peak_of_the_step() -> None:
    asked = compose(LM).job
    plan = plan_job(asked)
    planned = plan.estimate.memory[0].total
    room = planned * 3 // 4
    early = InUse("cuda:0", total=room, free=room // 2, tensors=room // 2, kept=0, requested=room // 2 + 4)
    found = cure(early, 0, asked, plan)
    assert early.missing == 4
    assert found is not None
    assert found.planned <= room


@pytest.mark.parametrize(
    ("at", "has_state", "times"),
    [
        # by the plan it would have fitted, but its tensors took more
        ({"tensors": 60, "requested": 15}, True, 1.25),
        # before the first update the optimizer has not allocated its 20
        ({"tensors": 47, "requested": 1}, False, 1.2),
        # far from the peak nothing is known
        ({"tensors": 20, "requested": 4}, True, 1.0),
        # an allocator that takes a tenth more than tensors hold
        ({"tensors": 50, "kept": 5, "requested": 5}, True, 1.1),
        # on the CPU only the memory of the process is known
        ({"tensors": 600, "total": 0}, True, 1.0),
    ],
    ids=["more than planned", "before an update", "early", "kept", "cpu"],
)
def test_the_margin_is_what_this_run_took_above_its_plan(at: dict[str, int], has_state: bool, times: float) -> None:
    planned = Memory(0, params=10 * GB, grads=0, optimizer=20 * GB, gathered=0, activations=30 * GB)
    seen = {"total": 80, "free": 0, "tensors": 0, "kept": 0, "requested": 0} | at
    in_use = InUse("cuda:0", **{name: n * GB for name, n in seen.items()})
    assert overhead(in_use, planned, has_state) == pytest.approx(times)


def test_a_cure_has_room_for_what_this_run_took_above_its_plan() -> None:
    """This rank took 1.5 times its plan, so the first layout that fits by its plan alone is not proposed."""
    asked = compose(LM).job
    plan = plan_job(asked)
    room = plan.estimate.memory[0].total
    at = InUse("cuda:0", total=room, free=0, tensors=room, kept=0, requested=4)
    lighter, least = cure(at, 0, asked, plan), cure(at, 0, asked, plan, excess=1.5)
    assert lighter is not None
    assert least is not None
    assert 1.5 * least.planned <= room < 1.5 * lighter.planned


def test_nothing_is_proposed_that_does_not_save_enough() -> None:
    asked = compose(LM).job
    plan = plan_job(asked)
    missing = plan.estimate.memory[0].total - (1 << 20)
    assert cure(replace(FULL, tensors=GB, kept=0, free=0, requested=missing), 0, asked, plan) is None


def message(error: BaseException, plan: object = None) -> str:
    with pytest.raises(OutOfMemory) as told, explained(HERE, job(), plan):  # type: ignore[arg-type]
        raise error
    return str(told.value)


def wrapped(cause: BaseException) -> RuntimeError:
    """Wrap an error as torch's pipeline does for a stage."""
    error = RuntimeError("[Stage 0] failed to run forward: ...")
    error.__cause__ = cause
    return error


def test_the_errors_of_allocators_are_known_also_where_the_pipeline_wraps_them() -> None:
    text = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which ..."
    assert "an allocation of 1.5 GB failed" in message(torch.OutOfMemoryError(text))
    assert "an allocation of 1.5 GB failed" in message(wrapped(torch.OutOfMemoryError(text)))
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "an allocation of 1048576.0 TB failed" in message(real.value)
    assert "an allocation of" not in message(torch.OutOfMemoryError("no more"))


@pytest.mark.parametrize(
    "error", [ValueError("no"), RuntimeError("out of memory, as a user says it"), RunError("ours")]
)
def test_every_other_error_passes_through(error: Exception) -> None:
    with pytest.raises(type(error)) as same, explained(HERE, job(), None):
        raise error
    assert same.value is error


def test_a_trial_of_a_layout_looks_for_no_other() -> None:
    asked = job()
    with pytest.raises(OutOfMemory) as told, explained(HERE, asked, plan_job(asked), trial=True):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    assert "planned: " in str(told.value)
    assert "try: " not in str(told.value)


def test_ranks_that_ran_out_of_memory_too_are_one_line() -> None:
    faults = [raised(rank, 0, OutOfMemory(f"out of memory on cuda:{rank}: figures of its own")) for rank in range(3)]
    assert str(failed(faults)) == (
        "rank 0: out of memory on cuda:0: figures of its own\nalso failed, the same way: ranks 1, 2"
    )


def test_an_allocator_that_keeps_pieces_is_told_how_to_join_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.steps.model.out_of_memory.in_use", lambda device, message: FULL)
    asked = job()
    assert "in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True joins them" in _with_plan(asked)


def _with_plan(asked: object) -> str:
    with pytest.raises(OutOfMemory) as told, explained(HERE, asked, plan_job(asked)):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return str(told.value)
