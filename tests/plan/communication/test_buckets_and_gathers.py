"""Tensors that travel together: groups that are gathered, and buckets that are reduced."""

from __future__ import annotations

from launcher.job.schema.parallel import Hsdp
from launcher.plan.communication.buckets_and_gathers import Bucket, GatherGroup, Limits, buckets, groups
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import Graph, ModelStructure
from tests.plan.cut.test_tensor_placement import HSDP, KB, TIED, laid, sizes
from tests.plan.made import chain, graph, skeleton

ALONE = Limits(False, None, 64 << 20)


def grouped(model: ModelStructure, glue: Graph, told: dict[str, int], sz: Sizes) -> tuple[GatherGroup, ...]:
    params, made = laid(model, glue, told, sz)
    return groups(params, made, model, glue, ALONE)


def test_each_unit_is_gathered_by_itself_in_the_order_of_the_model() -> None:
    model = skeleton({"a.x.weight": KB, "a.y.weight": KB, "b.weight": KB, "b.bias": (1,)})
    assert grouped(model, chain("a", "b"), {"a": 0, "b": 1}, sizes()) == (
        GatherGroup(0, ("a",), ("a.x.weight", "a.y.weight"), 2048),
        GatherGroup(1, ("b",), ("b.weight",), 1024),
    )


def test_tied_inside_one_stage_is_gathered_with_the_whole_stage() -> None:
    model = skeleton({f"{m}.weight": KB for m in "abc"}, same={"b.weight": "a.weight"})
    found = grouped(model, chain("a", "b", "c"), {"a": 0, "b": 0, "c": 1}, sizes())
    assert found == (GatherGroup(0, ("",), ("a.weight",), 1024), GatherGroup(1, ("c",), ("c.weight",), 1024))


def test_tied_over_stages_is_gathered_under_the_name_that_each_stage_has() -> None:
    assert grouped(TIED, chain("a", "b"), {"a": 0, "b": 1}, sizes()) == (
        GatherGroup(0, ("a",), ("a.weight",), 1024),
        GatherGroup(1, ("b",), ("b.weight",), 1024),
    )


def test_parameters_that_the_glue_uses_are_gathered_with_the_stage() -> None:
    model = skeleton({"pos": KB, "a.weight": KB, "b.weight": KB})
    glue = graph(
        "x: input x", "pos: param pos", "w: param a.weight", "a: module a < x", "s: glue add < a pos w",
        "b: module b < s", "output: output output < b",
    )  # fmt: skip
    assert grouped(model, glue, {"a": 0, "b": 1}, sizes()) == (
        GatherGroup(0, ("",), ("pos", "a.weight"), 2048),
        GatherGroup(1, ("b",), ("b.weight",), 1024),
    )


def test_a_unit_that_lies_on_two_stages_is_gathered_with_each_whole_stage() -> None:
    model = skeleton({"a.x.weight": KB, "a.y.weight": KB})
    assert grouped(model, chain("a.x", "a.y"), {"a.x": 0, "a.y": 1}, sizes()) == (
        GatherGroup(0, ("",), ("a.x.weight",), 1024),
        GatherGroup(1, ("",), ("a.y.weight",), 1024),
    )


def bucketed(limit: int, sz: Sizes | None = None, hsdp: Hsdp | None = None) -> tuple[Bucket, ...]:
    model = skeleton(
        {"a.one": (256,), "a.two": (256,), "a.still": (256,), "a.three": (512,), "a.four": (1,), "b.one": (256,)},
        frozen=["a.still"],
    )
    sz = sz or sizes()
    params, made = laid(model, chain("a", "b"), {"a": 0, "b": 1}, sz, hsdp)
    return buckets(params, made, sz, Limits(False, None, limit))


def test_buckets_are_filled_in_order_up_to_the_limit() -> None:
    assert bucketed(2048) == (
        Bucket(0, ("a.one", "a.two"), 2048),
        Bucket(0, ("a.three",), 2048),
        Bucket(0, ("a.four",), 4),
        Bucket(1, ("b.one",), 1024),
    )


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own() -> None:
    assert [b.names for b in bucketed(1)] == [("a.one",), ("a.two",), ("a.three",), ("a.four",), ("b.one",)]


def test_sharded_parameters_are_in_no_bucket() -> None:
    assert [b.names for b in bucketed(1 << 20, hsdp=HSDP)] == [("a.four",)]


def test_without_a_second_replica_there_is_nothing_to_reduce() -> None:
    assert bucketed(1, sizes(shard=1)) == ()


def test_a_bucket_has_one_dtype() -> None:
    model = skeleton({"a.one": (2,), "a.two": (2,), "a.three": (2,), "b.one": (2,)})
    mixed = ModelStructure(
        model.modules,
        tuple(p if p.name != "a.two" else type(p)(p.name, type(p.spec)((2,), "float64"), p.name) for p in model.params),
        model.containers,
    )
    params, made = laid(mixed, chain("a", "b"), {"a": 0, "b": 1}, sizes(), None)
    assert [b.names for b in buckets(params, made, sizes(), ALONE)] == [("a.one", "a.three"), ("a.two",), ("b.one",)]
