"""Weights used outside their own modules are gathered by the module that runs; modules in a row are fused."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.planner.plan_job import plan_job
from tests.parallel.counting import assert_as_planned
from tests.parity import assert_parity, own

NETS: dict[str, dict[str, list[str]]] = {
    "Around": {"second": ["second.weight", "second.bias"], "head": ["head.weight", "head.bias"],
               "": ["scale", "first.weight", "first.bias"]},
    "Inside": {"attn": ["attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"],
               "block": ["block.inner.weight", "block.inner.bias", "block.norm.weight", "block.norm.bias"],
               "head": ["head.weight", "head.bias"]},
    "Method": {"embed": ["embed.weight", "embed.bias"],
               "": ["head.inner.weight", "head.inner.bias", "head.norm.weight", "head.norm.bias"]},
}  # fmt: skip


def net(name: str, level: str, **fusion: Any) -> Any:
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
    parallel = {"hsdp": hsdp, "comm_fusion": fusion, "pipeline": {"micro_batch_num": 2}}
    return own(f"glue_nets.{name}", [4, 6], stages=1, parallel=parallel)


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
@pytest.mark.parametrize("name", NETS)
def test_a_weight_used_outside_its_module_is_gathered_with_what_runs_there(name, level):
    plan, _ = assert_parity(net(name, level))
    assert {m: sorted(g.names) for g in plan.groups for m in g.modules} == {m: sorted(n) for m, n in NETS[name].items()}


@pytest.mark.parametrize("name", ["Around", "Inside"])
def test_a_weight_used_outside_its_module_is_gathered_there_also_without_fusion(name):
    plan, _ = assert_parity(net(name, "level3", openstate=False))
    homes = {n: g.modules for g in plan.groups for n in g.names}
    want = {"Around": ("first.weight", ("",)), "Inside": ("attn.out_proj.weight", ("attn",))}[name]
    assert homes[want[0]] == want[1]


def test_a_weight_used_outside_its_module_is_exact_in_a_stage_of_one_module():
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}
    pipeline = {"stages": 2, "stage_config": {"first": 0, "second": 1, "head": 1, "scale": 0}}
    assert_parity(own("glue_nets.Around", [4, 6], stages=1, parallel={"hsdp": hsdp, "pipeline": pipeline}))


@pytest.mark.parametrize("level", ["level2", "level3"])
def test_branches_are_not_gathered_together(level):
    """torch would reduce the gradients of both when only one has any."""
    j = net("Branches", level, allgather={"mode": "size"})
    assert [g.modules for g in plan_job(j).groups] == [("stem", "left"), ("right", "head")]
    assert_parity(j)
    assert_as_planned(j)


@pytest.mark.parametrize("uneven", ["pad", "whole"])
def test_uneven_parameters_are_padded_or_left_whole(uneven):
    hsdp = {"shard_size": 2, "threshold": 0, "uneven": uneven}
    j = own("glue_nets.Uneven", [6], stages=1, parallel={"hsdp": hsdp})
    plan, _ = assert_parity(j)
    assert {p.sharded for p in plan.params} == {uneven == "pad"}
    notes = {
        "pad": "parallel.hsdp.uneven pad: first.weight, first.bias, second.weight and 3 more: dim 0 is not a multiple "
        "of 2, so the last ranks hold less or nothing",
        "whole": "parallel.hsdp.uneven whole: first.weight, first.bias, second.weight and 3 more stay unsharded, "
        "because dim 0 is not a multiple of 2",
    }
    assert notes[uneven] in map(str, plan.notes)
    assert_as_planned(j)
