"""If ranks cannot follow a forward that changes weights or what is trained, the plan or step refuses it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import RequestError, RunError
from launcher.job.schema.job import Job
from launcher.objective.losses import ClassLoss
from launcher.parallel import parallelize
from launcher.parallel.copied_weight_changes import largest_differences
from launcher.parallel.local_tensors import local
from launcher.plan.plan import Plan
from launcher.planner.plan_job import builder, plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop, save
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.steps import train
from launcher.steps.model import build_session
from tests.parity import batch, own, place
from tests.ranks import DRAWN, on_ranks

LATE = 4
"""A call after the three forwards that a plan tries, within the second step."""


def sharded(level: str) -> dict[str, Any]:
    return {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}}


@dataclass(frozen=True)
class Layout:
    ranks: int
    stages: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp64"


FOLLOW = {"one rank": Layout(1), "replicas": Layout(2, parallel={"grid": {"dp_replicate": 2}})}
LOSE = {
    "stages": Layout(2, 2),
    "shards": Layout(2, parallel=sharded("level1")),
    "shards, gathered once": Layout(2, parallel=sharded("level2")),
    "shards, gathered twice": Layout(2, parallel=sharded("level3")),
    "half precision": Layout(1, precision="bf16"),
}


def job_of(layout: Layout, at: int, change: str = "freeze") -> Job:
    last = layout.stages - 1
    cut = {"a": 0, "b": 0, "head": last}
    pipeline = {"stages": layout.stages, "stage_config": cut if last else "auto", "micro_batch_num": 2}
    return own(
        "late_change_nets.Changes", [6], stages=cut, train__batch_size=8, train__precision=layout.precision,
        model={"_target_": "tests.parallel.late_change_nets.Changes", "change": change, "at": at},
        parallel=layout.parallel | {"pipeline": pipeline},
    )  # fmt: skip


@pytest.mark.parametrize("layout", LOSE.values(), ids=LOSE)
def test_a_change_of_requires_grad_in_the_first_call_is_refused_by_the_plan(layout: Layout) -> None:
    with pytest.raises(RequestError, match=r"the forward of b sets requires_grad of b\.weight, but"):
        plan_job(job_of(layout, 0))


def rank_steps(world: World, j: Job, plan: Plan, folder: Path) -> list[bool]:
    """Whether the weight had a gradient at each step."""
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    weight = {placed.name: t for placed, t in s.model.named()}.get("b.weight")
    had = []
    for _ in range(3):
        loop.step(s, None)
        had.append(weight is not None and weight.grad is not None)
        s.step += 1
    return had


@pytest.mark.parametrize("layout", LOSE.values(), ids=LOSE)
def test_a_change_of_requires_grad_in_a_later_call_ends_the_step(layout: Layout, tmp_path: Path) -> None:
    j = job_of(layout, LATE)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(layout.ranks, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "step 2: the forward changed requires_grad of b.weight, so this layout would train other numbers than one "
        "device; freeze it in the constructor, or detach() its output, or train with one rank in fp32. "
        "The weights were not changed"
    )


@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("variable", "tests.parallel.late_change_nets.FLAGS"),
        ("attribute", "settings of Announces"),
        ("tensor in a variable", "tests.parallel.late_change_nets.SCALE"),
        ("tensor", "scale of Announces"),
    ],
)
def test_a_flag_that_another_stage_would_not_see_ends_the_step(way: str, place: str, tmp_path: Path) -> None:
    j = own(
        "late_change_nets.Flags", [6], stages={"a": 0, "b": 0, "head": 1}, train__batch_size=8,
        model={"_target_": "tests.parallel.late_change_nets.Flags", "way": way, "at": LATE},
        parallel={"pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"a": 0, "b": 0, "head": 1}}},
    )  # fmt: skip
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        f"step 2: a forward changed {place}, which other stages read in their own processes, so this layout would "
        "train other numbers than one device; pass it as an argument, or name a larger module in stage_config. "
        "The weights were not changed"
    )


@pytest.mark.parametrize("recomputed", [[], ["head"]], ids=["kept", "recomputed"])
def test_a_record_that_forwards_only_store_ends_no_step(recomputed: list[str], tmp_path: Path) -> None:
    stages = {"a": 0, "b": 0, "head": 1}
    j = own(
        "late_change_nets.Flags", [6], stages=stages, train__batch_size=8,
        model={"_target_": "tests.parallel.late_change_nets.Flags", "way": "a record", "at": LATE},
        parallel={
            "pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": stages},
            "recompute": {"modules": recomputed},
        },
    )  # fmt: skip
    assert on_ranks(2, rank_steps, j, plan_job(j), tmp_path) == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("variable", "tests.parallel.late_change_nets.FLAGS"),
        ("attribute", "a.settings"),
        ("tensor in a variable", "tests.parallel.late_change_nets.SCALE"),
        ("tensor", "a.scale"),
        ("tensor in an object", "a.settings"),
    ],
)
def test_a_flag_that_changes_between_a_forward_and_its_recomputation_ends_the_step(
    way: str, place: str, policy: str, tmp_path: Path
) -> None:
    j = own(
        "late_change_nets.FlagsAfter", [6], stages=1, train__batch_size=8,
        model={"_target_": "tests.parallel.late_change_nets.FlagsAfter", "way": way, "at": LATE},
        parallel={"pipeline": {"micro_batch_num": 2}, "recompute": {"modules": ["a"], "policy": policy}},
    )  # fmt: skip
    with pytest.raises(RanksFailed) as failed:
        on_ranks(1, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        f"parallel.recompute.modules: a cannot be recomputed in the backward: {place} was changed after its forward, "
        "which may read it; leave a out"
    )


def scales(world: World, j: Job, plan: Plan, folder: Path) -> list[list[float]]:
    """The tensors of both modules after a step of two micro batches."""
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    loop.step(s, None)
    return [s.model.parts[0].module.get_submodule(name).scale.tolist() for name in "ab"]


def test_a_tensor_in_attributes_of_two_modules_stays_one(tmp_path: Path) -> None:
    j = own(
        "late_change_nets.FlagsAfter", [6], stages=1, train__batch_size=8,
        model={"_target_": "tests.parallel.late_change_nets.FlagsAfter", "way": "tensor", "at": 2},
        parallel={"pipeline": {"micro_batch_num": 2}},
    )  # fmt: skip
    assert on_ranks(1, scales, j, plan_job(j), tmp_path) == [[[2.0] * 3] * 2]


def test_what_backward_hooks_count_ends_no_step_if_no_forward_reads_it(tmp_path: Path) -> None:
    j = own(
        "late_change_nets.LogsGradients", [6], stages={"a": 0, "b": 0, "head": 1}, train__batch_size=8,
        parallel={
            "pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"a": 0, "b": 0, "head": 1}},
            "recompute": {"modules": ["b", "head"]},
        },
    )  # fmt: skip
    assert on_ranks(2, rank_steps, j, plan_job(j), tmp_path) == [[True] * 3, [False] * 3]


def test_a_write_in_place_between_a_forward_and_its_backward_is_refused_by_autograd(tmp_path: Path) -> None:
    j = job_of(LOSE["stages"], LATE, "halve")
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_steps, j, plan_job(j), tmp_path)
    assert "Failed to run stage backward" in failed.value.fault.message


@pytest.mark.parametrize(("name", "change"), [*product(LOSE, ["replace", "write"]), *product([*LOSE][1:], ["halve"])])
def test_values_that_a_later_call_changes_are_not_lost_silently(name: str, change: str, tmp_path: Path) -> None:
    layout = LOSE[name]
    j = job_of(layout, LATE, change)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(layout.ranks, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "step 2: the forward changed b.weight, so this layout would train other numbers than one device; let the "
        "forward compute with a copy, or train with one rank in fp32. The weights were not changed"
    )


def own_loop(world: World, j: Job, plan: Plan) -> str:
    """The error that ends the third step of a user's own loop."""
    net = parallelize(builder(j), plan)
    xs, y = batch(j, plan)
    n = plan.sizes.local_batch
    mine = slice(place(plan, net.live.meshes) * n, (place(plan, net.live.meshes) + 1) * n)
    pipe = PipelineRuntime(net.live, plan.inputs, ClassLoss(), torch.device("cpu"))
    for _ in range(2):
        pipe.step(tuple(x[mine] for x in xs), y[mine])
    with pytest.raises(RunError) as raised:
        pipe.step(tuple(x[mine] for x in xs), y[mine])
    return str(raised.value)


@pytest.mark.parametrize("name", [name for name in LOSE if name != "stages"])
def test_a_loop_of_the_user_ends_at_the_step_after(name: str) -> None:
    j = job_of(LOSE[name], LATE, "write")
    why = "the forward changed b.weight, so this layout would train other numbers than one device"
    want = f"{why}; let the forward compute with a copy, or train with one rank in fp32"
    assert on_ranks(LOSE[name].ranks, own_loop, j, plan_job(j)) == [want] * LOSE[name].ranks


def restarting(what: str, layout: Layout, at: int = LATE) -> Job:
    return own(
        "late_change_nets.Restarts", [6], stages=0, train__batch_size=8, train__precision=layout.precision,
        model={"_target_": "tests.parallel.late_change_nets.Restarts", "what": what, "at": at},
        parallel=layout.parallel | {"pipeline": {"micro_batch_num": 2}},
    )  # fmt: skip


def saved(world: World, j: Job, plan: Plan, folder: Path) -> str:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    for _ in range(2):
        loop.step(s, None)
        s.step += 1
    return save.save(s, None).name


def test_a_buffer_that_a_later_call_makes_of_one_ranks_samples_ends_the_step(tmp_path: Path) -> None:
    j = restarting("middle", FOLLOW["replicas"])
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "step 2: the forward changed b.middle using the samples of one data-parallel rank only, so this layout would "
        "train other numbers than one device; compute it from all samples, or train with one data-parallel rank. "
        "The weights were not changed"
    )


REPLICAS_OF_SHARDS = Layout(4, parallel=sharded("level1") | {"grid": {"dp_replicate": 2, "dp_shard": 2}})


def test_a_weight_that_a_later_call_makes_of_one_ranks_samples_is_not_saved(tmp_path: Path) -> None:
    j = restarting("weight", FOLLOW["replicas"])
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, saved, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "after step 2 b.weight differs between the ranks 0, 1, whose copies must be equal: a forward, a hook, a "
        "callback or the optimizer changed it with values that only some ranks have. No checkpoint of this step was "
        "written; use values that all ranks have, or train with one data-parallel rank"
    )
    assert not [*tmp_path.glob("checkpoints/*")]


def damaged(world: World, j: Job, plan: Plan, folder: Path, name: str, rank: int) -> str:
    """Save a checkpoint after one number of ``name`` has changed by one bit on ``rank``."""
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    if world.rank == rank:
        for placed, t in s.model.named():
            if placed.name == name:
                raw = local(t.detach()).view(-1)[:1].view(torch.int64)
                raw ^= 1
    return save.save(s, None).name


@pytest.mark.parametrize("rank", range(4))
def test_one_bit_of_one_copy_keeps_a_checkpoint_from_being_written(rank: int, tmp_path: Path) -> None:
    j = restarting("weight", REPLICAS_OF_SHARDS)
    plan = plan_job(j)
    twins = ", ".join(str(r) for r in sorted({rank, rank ^ 2}))
    with pytest.raises(RanksFailed) as failed:
        on_ranks(4, damaged, j, plan, tmp_path, "head.weight", rank)
    assert f"head.weight differs between the ranks {twins}," in failed.value.fault.message


@pytest.mark.parametrize("layout", FOLLOW.values(), ids=FOLLOW)
def test_where_the_trained_weight_itself_is_used_it_is_frozen(layout: Layout, tmp_path: Path) -> None:
    j = job_of(layout, LATE)
    assert on_ranks(layout.ranks, rank_steps, j, plan_job(j), tmp_path) == [[True, True, False]] * layout.ranks


NOTE = (
    "{} changed after the first step, by a forward or a callback; no checkpoint contains it, so a resumed run resets "
    "it; register it as a persistent buffer, or return it from get_extra_state"
)
APART = "{} differs between ranks: if a forward reads it, this layout trains other weights than one rank"
NOTED = {
    "number": [NOTE.format("b.number"), APART.format("b.number")],
    "passing": [NOTE.format("b.passing"), APART.format("b.passing")],
    "same on all": [NOTE.format("b.loud, b.names")],
}


def texts_of(world: World, j: Job, plan: Plan, folder: Path) -> list[str]:
    """The messages of a training of five steps that saves and then reports late state again."""
    rows: list[dict[str, Any]] = []
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    s.emit = rows.append
    loop.train(s, replace(train.loop_settings(s, j), until=5))
    save.save(s, None)
    save.report_late_state(s)
    return [row["text"] for row in rows if "text" in row]


@pytest.mark.parametrize("call", [4, 7, 10])
@pytest.mark.parametrize("what", NOTED)
def test_state_that_a_later_call_sets_is_noted_when_a_checkpoint_is_written(
    what: str, call: int, tmp_path: Path
) -> None:
    j = restarting(what, FOLLOW["replicas"], call)
    assert on_ranks(2, texts_of, j, plan_job(j), tmp_path) == [NOTED[what], []]


@pytest.mark.parametrize("layout", [*FOLLOW.values(), *LOSE.values()], ids=[*FOLLOW, *LOSE])
def test_nothing_is_noted_of_what_does_not_change(layout: Layout, tmp_path: Path) -> None:
    j = job_of(layout, 1000)
    assert on_ranks(layout.ranks, texts_of, j, plan_job(j), tmp_path) == [[]] * layout.ranks


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_hides_no_difference_of_others(odd: float) -> None:
    one = torch.tensor([odd, 1.0, 2.0])
    assert largest_differences([one, one], [one.clone(), one + torch.tensor([0.0, 0.0, 0.5])]).tolist() == [0, 0.5]


def thaws(cut: dict[str, int]) -> Job:
    model = {"_target_": "tests.parallel.late_change_nets.Thaws", "at": 5}
    return own("late_change_nets.Thaws", [6], stages=cut, train__batch_size=8, model=model)


def test_an_output_that_needs_a_gradient_only_from_a_later_call_on_is_refused_over_stages() -> None:
    text = "whether tanh needs a gradient changes after many forwards, but a stage sends it either always with its"
    with pytest.raises(RequestError, match=text):
        plan_job(thaws({"a": 0, "head": 1}))
    plan_job(thaws({"a": 0, "head": 0}))
