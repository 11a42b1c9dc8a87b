from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.plan import Plan, ask, leaves, plan
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.note import Note
from launcher.planner.plan_job import plan_job
from tests.plan.made import chain, graph, job, planned, skeleton, words

W = (64, 64)
PP2 = ("launch.nproc=2", "parallel.pipeline.stages=2")
AB = skeleton({"a.weight": W, "b.weight": W})
ONE = graph("x: input x", "model: module . < x", "output: output output < model")
"""The graph of a model that is not split into stages."""


def values(thing: Any) -> Iterator[Any]:
    """``thing`` and everything inside it."""
    yield thing
    if dataclasses.is_dataclass(thing):
        inside: Any = (getattr(thing, f.name) for f in dataclasses.fields(thing))
    elif isinstance(thing, BaseModel):
        inside = (getattr(thing, name) for name in type(thing).model_fields)
    else:
        inside = thing if isinstance(thing, tuple) else ()
    for v in inside:
        yield from values(v)


PLANS = {
    "pipeline, shards and a tie": ["recipe=lm_tied_pp2_hsdp2", "model.dim=16", "data=text"],
    "virtual stages": ["recipe=lm_pp4_interleaved", "model.dim=16", "data=text"],
    "explicit stages": ["recipe=mlp_autoparallel"],
}


@pytest.mark.parametrize("recipe", PLANS)
def test_a_plan_is_made_of_frozen_values(recipe: str) -> None:
    made = plan_job(compose(PLANS[recipe]).job)
    assert isinstance(hash(made), int)
    for value in values(made):
        assert isinstance(value, tuple | str | int | float | None) or _frozen(value), value


def _frozen(value: Any) -> bool:
    if isinstance(value, BaseModel):
        return bool(value.model_config.get("frozen"))
    return bool(getattr(value, "__dataclass_params__").frozen)  # noqa: B009  mypy has no such attribute


def test_planning_changes_nothing_it_was_given() -> None:
    j, glue, notes = job(*PP2), chain("a", "b"), [Note("model", "a -> b")]
    asked = ask(j)
    before = copy.deepcopy((j, asked, AB, glue, notes))
    why = Note("parallel.deferred_init", "true -> false: so")
    made = plan(j, asked, TracedModel(AB, glue, leaves(asked, AB), built_unsharded=why), notes)
    assert (j, asked, AB, glue, notes) == before
    assert made.notes[0] == notes[0]


def test_the_plan_has_a_value_for_every_open_default() -> None:
    made = planned(job("launch.nproc=4", "parallel.pipeline.stages=2", "parallel.hsdp={}"), AB, chain("a", "b"))
    assert made.sizes.grid.axes == (("pp", 2), ("dp_replicate", 1), ("dp_shard", 2), ("tp", 1))
    assert made.sizes.micros == 2


def test_explicit_stages_are_as_told_and_a_module_without_follows_its_parameters() -> None:
    model = skeleton({"a.weight": W, "net.b.weight": W, "net.c.weight": W}, containers=["net"])
    told = "parallel.pipeline.stage_config={a: 0, net.b: 0, net.c: 1}"
    made = planned(job(*PP2, told), model, chain("a", "net.b", "net.c"))
    assert [s.modules for s in made.stages] == [("a", "net.b"), ("net.c",)]


def test_nested_keys_from_yaml_are_dotted_ones() -> None:
    model = skeleton({"layers.0.weight": W, "layers.1.weight": W}, containers=["layers"])
    data = job(*PP2).model_dump(by_alias=True)
    data["parallel"]["pipeline"]["stage_config"] = {"layers": {"0": 0, "1": 1}}
    made = planned(Job.model_validate(data), model, chain("layers.0", "layers.1"))
    assert [s.modules for s in made.stages] == [("layers.0",), ("layers.1",)]


def test_a_glob_may_name_parameters_of_the_root() -> None:
    model = skeleton({"pos_a": W, "a.weight": W, "b.weight": W})
    glue = graph(
        "x: input x",
        "p: param pos_a",
        "a: module a < x",
        "s: glue add < a p",
        "b: module b < s",
        "output: output output < b",
    )
    made = planned(job(*PP2, "parallel.pipeline.stage_config={a: 0, pos_*: 1, b: 1}"), model, glue)
    assert [s.params for s in made.stages] == [("a.weight",), ("pos_a", "b.weight")]


def test_automatic_stages_are_balanced_by_what_is_known_and_say_so() -> None:
    model = skeleton({"a.weight": (30, 64), "b.weight": W, "c.weight": (20, 64)})
    made = planned(job(*PP2), model, chain("a", "b", "c"))
    assert [s.modules for s in made.stages] == [("a",), ("b", "c")] or [s.modules for s in made.stages] == [
        ("a", "b"),
        ("c",),
    ]
    assert (
        "parallel.pipeline.stage_config auto -> the stages above: balanced by flops and bytes written, the slowest "
        "rank 33.3% above the mean"
    ) in map(str, made.notes)


TOO_FEW = {
    "stages": (
        ["launch.nproc=4", "parallel.pipeline.stages=4"],
        "parallel.pipeline.stages: the model has 2 modules with parameters, too few for 4 stages "
        "(try: parallel.pipeline.stages=2)",
    ),
    "stages that divide the ranks": (
        ["launch.nproc=3", "parallel.pipeline.stages=3", "train.batch_size=36"],
        "parallel.pipeline.stages: the model has 2 modules with parameters, too few for 3 stages "
        "(try: parallel.pipeline.stages=1)",
    ),
    "virtual stages": (
        [*PP2, "parallel.pipeline.interleave=true"],
        "parallel.pipeline.interleave: the model has 2 modules with parameters, too few for 4 stages "
        "(try: parallel.pipeline.interleave=false)",
    ),
}


@pytest.mark.parametrize("case", TOO_FEW)
def test_a_model_with_too_few_modules_is_not_cut_automatically(case: str) -> None:
    overrides, text = TOO_FEW[case]
    with pytest.raises(RequestError) as caught:
        planned(job(*overrides), AB, chain("a", "b"))
    assert str(caught.value) == text
    j = job(*overrides, *words(caught.value))
    planned(j, AB, ONE if ask(j).sizes.virtual == 1 else chain("a", "b"))


def test_an_output_that_no_loss_can_take_is_refused() -> None:
    glue = graph("x: input x", "model: module . < x", "output: output output < model", out={"output": None})
    with pytest.raises(RequestError) as caught:
        planned(job(), AB, glue)
    assert str(caught.value) == (
        "model: its forward returns an object, neither a tensor nor a plain tuple, list or dict of tensors; "
        "for a loss of your own return one of these, otherwise return only the logits, as in out.logits"
    )


def ragged(rows: int, glue: Graph) -> Plan:
    model = skeleton({"a.weight": (rows, 64), "a.bias": (4,), "b.weight": W})
    j = job("launch.nproc=8", "parallel.pipeline.stages=2", "parallel.hsdp.shard_size=4", "parallel.hsdp.threshold=1")
    return planned(j, model, glue)


def test_unsharded_and_unevenly_cut_parameters_are_noted() -> None:
    assert [str(n) for n in ragged(30, chain("a", "b")).notes][-2:] == [
        "parallel.hsdp.threshold 1 KB: 1 smaller parameter stays unsharded; its gradient is all-reduced",
        "parallel.hsdp.uneven pad: a.weight: dim 0 is not a multiple of 4, so the last ranks hold less or nothing",
    ]
    assert "ragged" not in str(ragged(32, chain("a", "b")).notes)


def test_a_stage_without_operations_still_takes_the_time_to_write_its_output() -> None:
    made = planned(job(*PP2), AB, chain("a", "b"))
    assert made.estimate.timeline.busy == (2 * 3 * (10 + 16 * 32.0),) * 2
