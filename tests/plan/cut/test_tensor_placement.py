from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.job.schema.parallel import Hsdp
from launcher.plan.cut.stages import Stage, cut, place
from launcher.plan.cut.tensor_placement import Placed, Tie, placed, ties
from launcher.plan.sizes import Sizes
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import Graph, ModelStructure
from tests.plan.made import chain, skeleton

KB = (256,)  # float32
HSDP = Hsdp(threshold=1)


def sizes(pp: int = 2, replicate: int = 1, shard: int = 2, chunks: int = 1) -> Sizes:
    return Sizes(Grid.of(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=1), chunks, 2, 8, 4, 2, 1, ())


def laid(
    model: ModelStructure, glue: Graph, told: dict[str, int], sz: Sizes, hsdp: Hsdp | None = HSDP
) -> tuple[tuple[Placed, ...], tuple[Stage, ...]]:
    at, found = place(glue, told, sz.virtual - 1)
    made, lost = cut(glue, at, sz.virtual, model)
    assert found + lost == []
    return placed(model, made, sz, hsdp), made


def two(model: ModelStructure, sz: Sizes | None = None, **more: Any) -> tuple[Placed, ...]:
    return laid(model, chain("a", "b"), {"a": 0, "b": 1}, sz or sizes(), **more)[0]


@pytest.mark.parametrize(("elements", "sharded"), [(255, False), (256, True), (257, True)])
def test_a_parameter_of_the_threshold_is_sharded_a_smaller_one_is_not(elements: int, sharded: bool) -> None:
    (a, _) = two(skeleton({"a.weight": (elements,), "b.weight": KB}))
    assert a.sharded == sharded


def test_the_threshold_counts_the_whole_tensor_and_dim_0_is_cut() -> None:
    (a, _) = two(skeleton({"a.weight": (16, 16), "b.weight": KB}), sizes(shard=4))
    assert a.layout.split == (("dp_shard",), ())


WHOLE = {
    "a buffer": skeleton({"a.mean": (999,), "b.weight": KB}, buffers=["a.mean"]),
    "0-d": skeleton({"a.scale": (), "b.weight": KB}),
    "empty": skeleton({"a.none": (0, 4), "b.weight": KB}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_some_tensors_stay_whole_whatever_the_threshold(case: str) -> None:
    assert not two(WHOLE[case], hsdp=Hsdp(threshold=0))[0].sharded


def test_without_hsdp_or_with_one_rank_to_share_with_all_stay_whole() -> None:
    model = skeleton({"a.weight": KB, "b.weight": KB})
    assert not any(p.sharded for p in two(model, hsdp=None))
    assert not any(p.sharded for p in two(model, sizes(shard=1, replicate=2)))


TIED = skeleton({"a.weight": KB, "b.weight": KB}, same={"b.weight": "a.weight"})


def test_a_tied_tensor_is_there_once_on_all_its_stages() -> None:
    (a,) = two(TIED)
    assert (a.name, a.names, a.stages, a.layout.at) == ("a.weight", ("a.weight", "b.weight"), (0, 1), (("pp", (0, 1)),))
    assert ties((a,)) == (Tie("a.weight", (0, 1), (0, 1)),)


def test_a_frozen_tensor_on_two_stages_is_tied_without_gradients() -> None:
    model = skeleton({"a.weight": KB, "b.weight": KB}, same={"b.weight": "a.weight"}, frozen=["a.weight", "b.weight"])
    assert ties(two(model)) == (Tie("a.weight", (0, 1), (0, 1), trained=False),)


def test_a_buffer_on_two_stages_is_no_tie() -> None:
    model = skeleton({"a.mean": KB, "b.mean": KB}, same={"b.mean": "a.mean"}, buffers=["a.mean", "b.mean"])
    assert ties(two(model)) == ()


def test_two_virtual_stages_of_one_rank_are_one_place_and_two_copies() -> None:
    model = skeleton({f"{m}.weight": KB for m in "abcd"}, same={"c.weight": "a.weight"})
    told = dict(zip("abcd", range(4), strict=True))
    params, _ = laid(model, chain(*"abcd"), told, sizes(chunks=2))
    assert (params[0].stages, params[0].layout.at) == ((0, 2), (("pp", (0,)),))


def test_frozen_weights_stay_in_the_half_precision_of_their_file() -> None:
    made = skeleton({"a.weight": KB, "a.learns": KB, "a.fp16": KB, "b.weight": KB}, same={"b.weight": "a.weight"})
    told = {"a.weight": "bfloat16", "b.weight": "bfloat16", "a.fp16": "float16"}
    params = tuple(replace(p, stored=told.get(p.name, ""), trainable=p.name == "a.learns") for p in made.params)
    at, found = place(glue := chain("a", "b"), {"a": 0, "b": 1}, 1)
    stages, lost = cut(glue, at, 2, made)
    assert found + lost == []

    def kept(low: str | None) -> dict[str, tuple[str, str, bool]]:
        laid_out = placed(replace(made, params=params), stages, sizes(), HSDP, low=low)
        assert all(p.sharded for p in laid_out)
        return {p.name: (p.spec.dtype, p.compute, p.half) for p in laid_out}

    wide, half = ("float32", "bfloat16", False), ("bfloat16", "bfloat16", True)
    assert kept("bfloat16") == {"a.weight": half, "a.learns": wide, "a.fp16": wide}
    assert kept(None) == dict.fromkeys(("a.weight", "a.learns", "a.fp16"), ("float32", "float32", False))
