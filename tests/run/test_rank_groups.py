"""The groups that a plan names are those that the ranks create."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from launcher.parallel import mesh
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.run import rank_groups as by_axis
from launcher.runtime.cluster.world import World
from tests.parity import job
from tests.ranks import on_ranks


def planned(**parallel: Any) -> Plan:
    return plan_job(job(parallel=parallel))


def alike(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return by_axis.alike(plan.sizes.grid, plan.params)


def as_json(plan: Plan) -> str:
    return by_axis.as_json(plan.sizes.grid, plan.ties, plan.params)


def rank_groups(world: World, plan: Plan) -> dict[str, list[int]]:
    """Return every group that this rank is in, by its name in the group file."""
    meshes = mesh.build(plan.sizes.grid, "cpu", plan.ties)
    axes = meshes.mesh.mesh_dim_names or ()
    found = {axis: dist.get_process_group_ranks(meshes.mesh.get_group(axis)) for axis in axes}
    if meshes.dp is not None:
        found["dp"] = dist.get_process_group_ranks(meshes.dp)
    ties = {f"tied {','.join(map(str, row))}": dist.get_process_group_ranks(g) for row, g in meshes.ties.items()}
    return {name: ranks for name, ranks in (found | ties).items() if len(ranks) > 1}


def test_the_planned_groups_are_those_that_the_ranks_create() -> None:
    plan = planned(
        pipeline={"stages": 2}, hsdp={"shard_size": 2, "threshold": 0}, grid={"dp_replicate": 2, "dp_shard": 2}
    )
    made = on_ranks(8, rank_groups, plan)
    named = {g.name: g.ranks for g in by_axis.groups(plan.sizes.grid, plan.ties)}
    assert list(named) == ["pp", "dp_replicate", "dp_shard", "dp", "tied 0,1"]
    for rank, mine in enumerate(made):
        assert mine == {name: list(next(r for r in rows if rank in r)) for name, rows in named.items()}


def test_replicas_have_the_same_checkpoint() -> None:
    plan = planned(hsdp={"shard_size": 2, "threshold": 0}, grid={"dp_replicate": 2, "dp_shard": 2})
    assert alike(plan) == ((0, 2), (1, 3))
    assert alike(planned(hsdp={"shard_size": 4, "threshold": 0}, grid={"dp_shard": 4})) == (
        (0,),
        (1,),
        (2,),
        (3,),
    )


TEXT = """\
{
  "format": "launcher.groups",
  "version": 1,
  "grid": {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "tp": 1},
  "groups": [
    {"name": "dp_replicate", "axes": ["dp_replicate"], "use": "gradients summed over replicas", "ranks": [[0, 1]]}
  ],
  "same_checkpoint": [[0, 1]]
}
"""


def test_the_file_has_a_group_a_line() -> None:
    assert as_json(planned(grid={"dp_replicate": 2})) == TEXT
    alone = json.loads(as_json(planned()))
    assert (alone["groups"], alone["same_checkpoint"]) == ([], [[0]])
