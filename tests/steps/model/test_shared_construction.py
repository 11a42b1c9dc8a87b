"""Meta models that are built before ranks are forked equal those that each rank would build; each serves one build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from launcher.job.schema.job import Job
from launcher.parallel import mesh
from launcher.parallel.parallel_model import parallelize
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.compare import pieces
from launcher.steps.model import shared_construction
from launcher.steps.model.shared_construction import SharedMetaModels
from tests.parallel import python_state_nets as nets
from tests.parity import CPU, job, own, rank_step
from tests.ranks import here, on_ranks
from tests.test_parity_tp import SEQUENCE

STAGES: dict[str, Any] = {"pipeline": {"stages": 2}}
JOBS: dict[str, Job] = {
    "one rank": job(),
    "stages, sharded": job(parallel=STAGES | {"hsdp": {"shard_size": 2, "threshold": 0}}),
    "stages, operators": job(parallel=STAGES | {"grid": {"tp": 2}, "operators": SEQUENCE}),
    "half precision": job(parallel=STAGES, train__precision="bf16"),
    "no record": own("unrecorded.AsksForItsMemory", [4], stages=1, parallel={"hsdp": {"shard_size": 2}}),
}


def built_state(world: World, j: Job, plan: Plan, drawn: SharedMetaModels) -> list[Any]:
    """Return what a rank has after its build: the code and the names of its stages, and its values."""
    par = parallelize(drawn.take(j, plan), plan, mesh.build(plan.sizes.grid, "cpu", plan.ties), CPU)
    names = [[n for n, _ in part.module.named_modules()] for part in par.parts]
    return [[part.code for part in par.parts], names, [[p.name, p.value] for p in pieces(par, weights=True)]]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the builds in this process and in processes forked from it."""
    done = [0]

    def counted(*args: Any, draw: Callable[..., Any] = shared_construction.draw) -> Any:
        done[0] += 1
        return draw(*args)

    monkeypatch.setattr(shared_construction, "draw", counted)
    return done


@pytest.mark.parametrize("j", JOBS.values(), ids=JOBS)
def test_a_rank_holds_the_same_whether_it_draws_or_was_forked_with_it(j: Job, count: list[int]) -> None:
    plan, drawn = plan_job(j), SharedMetaModels()
    drawn.add(j, plan)

    def work(world: World) -> tuple[bool, list[int]]:
        both, counts = [], []
        for _ in range(2):
            both.append(built_state(world, j, plan, drawn))
            counts.append(count[0])
        return same(*both), counts

    for _ in range(2):  # a restarted attempt is forked with it, too
        assert here(work, plan.sizes.grid.size) == [(True, [1, 2])] * plan.sizes.grid.size


def test_a_shared_construction_is_used_only_once() -> None:
    plan = plan_job(JOBS["one rank"])
    used = shared_construction.draw(JOBS["one rank"], plan)

    def work(world: World) -> str:
        meshes = mesh.build(plan.sizes.grid, "cpu", plan.ties)
        parallelize(used, plan, meshes, CPU)
        with pytest.raises(AssertionError) as again:
            parallelize(used, plan, meshes, CPU)
        return str(again.value)

    assert here(work, 1) == ["it has joined before: a blueprint serves one build"]


@pytest.mark.parametrize(
    ("how", "deferred"), [("attribute", True), ("attribute", False), ("buffer", True), ("memory", False)]
)
def test_a_rank_traces_with_the_values_that_shapes_depend_on(how: str, deferred: bool) -> None:
    model = {"_target_": "tests.parallel.looking_nets.Table", "how": how}
    parallel = {"pipeline": {"stages": 2}, "deferred_init": deferred}
    j = own("looking_nets.Table", [6], stages=2, model=model, parallel=parallel)
    drawn = shared_construction.draw(j, plan_job(j))
    assert drawn.tracer is not None
    assert all(t.is_meta for t in drawn.model.parameters())


def test_a_step_comes_to_the_same() -> None:
    def twice(world: World, j: Job, plan: Plan) -> bool:
        (a, b, first), (c, d, second) = (rank_step(world, j, plan) for _ in range(2))
        return (a, b) == (c, d) and same([p.value for p in first], [p.value for p in second])

    j = JOBS["stages, operators"]
    assert on_ranks(4, twice, j, plan_job(j)) == [True] * 4


def test_ranks_tell_what_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    j, drawn = JOBS["stages, sharded"], SharedMetaModels()
    plan = plan_job(j)

    def failing(*_: Any) -> None:
        raise ValueError("no more")

    monkeypatch.setattr(shared_construction, "draw", failing)
    drawn.add(j, plan)
    with pytest.raises(ValueError, match="no more"):
        drawn.take(j, plan)


def test_each_is_drawn_as_if_it_were_the_first() -> None:
    j, drawn = own("python_state_nets.ByNumber", [6], stages={"a": 0, "b": 0, "head": 1}), SharedMetaModels()
    made = nets.Numbered.made
    plan = plan_job(j)
    drawn.add(j, plan, builds=2)
    each = [drawn.take(j, plan).model for _ in range(3)]
    assert [(m.a.number, m.b.number) for m in each] == [(made, made + 1)] * 3
