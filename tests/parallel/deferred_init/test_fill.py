"""Law 8: the weights at step 0 do not depend on the layout."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.parallel import mesh
from launcher.parallel.deferred_init import fill
from launcher.parallel.parallel_model import parallelize
from launcher.planner.plan_job import plan_job
from launcher.steps.model.shared_construction import draw
from tests.parity import CPU, LM, build, job, own, pieces, plain, whole
from tests.ranks import on_ranks
from tests.tiers import exhaustive, some


def hsdp(size: int) -> dict[str, Any]:
    return {"shard_size": size, "threshold": 0}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "shard 2": {"hsdp": hsdp(2)},
    "replicate 2 x shard 2": {"hsdp": hsdp(2), "grid": {"dp_replicate": 2}},
    "2 stages": {"pipeline": {"stages": 2}},
    "2 stages x shard 2, threshold": {"pipeline": {"stages": 2}, "hsdp": hsdp(2) | {"threshold": 3}},
    "interleaved x shard 2": {"pipeline": {"stages": 2, "interleave": True}, "hsdp": hsdp(2)},
    "4 stages": {"pipeline": {"stages": 4}},
}


def rank_weights(world, j, plan):
    return pieces(build(world, j, plan)[0], weights=True)


def weights(j) -> dict[str, torch.Tensor]:
    """The full weights of a layout at step 0; replicas and copies are compared."""
    plan = plan_job(j)
    ranks = on_ranks(plan.sizes.grid.size, rank_weights, j, plan)
    return whole(plan, [p for held in ranks for p in held])


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "whole"])
@pytest.mark.parametrize("layout", some(LAYOUTS.values()), ids=some(LAYOUTS))
def test_the_weights_at_step_0_are_bit_equal_in_every_layout(layout, deferred):
    j = job(model=LM | {"vocab_size": 63}, data__vocab_size=63, parallel=layout | {"deferred_init": deferred})
    got, model = weights(j), plain(job(model=LM | {"vocab_size": 63}, data__vocab_size=63,
                                       parallel__deferred_init=deferred), plan_job(j))  # fmt: skip
    want = fill.tensors(model)
    assert got.keys() == {p.name for p in plan_job(j).params}
    for name, t in got.items():
        assert torch.equal(t, want[name]), name


@pytest.mark.parametrize("net", ["nets.Vision", "odd_nets.Attribute"])
def test_weights_of_a_users_module_do_not_depend_on_the_cut(net):
    shapes = {"nets.Vision": [4, 4], "odd_nets.Attribute": [4, 6]}[net]
    one, two = (weights(own(net, shapes, stages=n)) for n in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)


WHOLE = {
    "unrecorded.AsksForItsMemory": "calls Tensor.data_ptr, which needs its memory",
    "constructors.LooksAtStrides": "gives b other values when it is replayed",
}


@pytest.mark.parametrize("maker", ["makers.RandomLook", "constructors.OtherSources", *WHOLE])
def test_a_model_that_looks_at_its_numbers_has_the_same_weights_in_every_layout(maker):
    jobs = [own(maker, [4], stages=1, parallel=p) for p in ({}, {"hsdp": hsdp(2)}, {"hsdp": hsdp(4)})]
    deferred = maker not in WHOLE
    assert [plan_job(j).deferred for j in jobs] == [deferred] * 3
    notes = [n.text for n in plan_job(jobs[0]).notes if n.key == "parallel.deferred_init"]
    why = f"the constructor {WHOLE.get(maker)}; every rank builds the full model once"
    assert notes == ([] if deferred else [f"true -> false: {why}"])
    one, *more = map(weights, jobs)
    assert one.keys()
    for other in more:
        assert all(torch.equal(one[n], other[n]) for n in one)


MB = 2**20
ROOT = Path(__file__).parents[3]
STATUS = Path("/proc/self/status")


def rank_memory(world, small, j) -> tuple[float, float]:
    """The peak MB of building the model, and MB of this rank's shards; ``small`` loads the code first."""
    built(world, *small)
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks, also those before the fork
    before = resident()
    par = built(world, *j)
    (peak,) = (int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    held = sum(p.value.numel() * p.value.element_size() for p in pieces(par, weights=True))
    return (peak - before) / MB, held / MB


def built(world, j, plan):
    """The model of a rank, without a pipeline, whose modules would take 100 MB more."""
    return parallelize(draw(j, plan), plan, mesh.build(plan.sizes.grid, "cpu", plan.ties), CPU)


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def wide(stages: int, layers: int):
    j = own("makers.Wide", [2048], stages=1, train__precision="fp32",
            parallel={"hsdp": hsdp(4 // stages), "pipeline": {"stages": stages}},
            model={"_target_": "tests.parallel.makers.Wide", "layers": layers})  # fmt: skip
    return j, plan_job(j)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=exhaustive)])
def test_deferred_init_of_384_mb_over_4_ranks_never_holds_much_more_than_a_share(stages):
    # in an interpreter of its own: memory that earlier tests left in this one would change meanwhile
    call = f"on_ranks(4, rank_memory, wide({stages}, 2), wide({stages}, 24))"
    work = f"from tests.parallel.deferred_init.test_fill import *; print({call})"
    # glibc reuses holes for large freed blocks or not, depending on addresses; with this it never does
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", work], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    for peak, held in ast.literal_eval(done.stdout):
        assert held == 96  # 384 MB over 4 ranks
        assert peak < held + 16 + 8, f"{peak:.0f} MB at the peak for {held:.0f} MB of shards and 16 MB of a layer"
