from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.plan.cut.uncut_modules import leaves, units
from launcher.plan.resolve.stage_config import complaints, flatten
from launcher.plan.values.module_names import owner, stage_of
from launcher.planner.plan_job import plan_job
from tests.plan.made import skeleton, words

KEY = "parallel.pipeline.stage_config"
W = (4, 4)
MODEL = skeleton(
    {"embed.weight": W, "layers.0.attn.weight": W, "layers.0.mlp.weight": (8, 8), "layers.1.attn.weight": W,
     "layers.1.mlp.weight": (8, 8), "norm.weight": (4,), "head.weight": W},
    containers=["layers"], bare=["act"],
)  # fmt: skip


@pytest.mark.parametrize(("config", "flat"), [
    ({"a": 0, "b": 1}, {"a": 0, "b": 1}),
    ({"a": {"b": {"c": 1}}}, {"a.b.c": 1}),
    ({"a.b": {"c": 1}, "a": {"b.d": 0}}, {"a.b.c": 1, "a.b.d": 0}),
    ({"layers": {0: 0, "1": 1}}, {"layers.0": 0, "layers.1": 1}),
    ({"layers.0": 0, "layers": {"0": 1}}, {"layers.0": 1}),
    ({}, {}),
    ({"a": {}}, {}),
], ids=str)  # fmt: skip
def test_dotted_and_nested_keys_mean_the_same(config: dict[Any, Any], flat: dict[str, Any]) -> None:
    assert flatten(config) == flat


def test_of_two_equal_keys_the_later_takes_the_later_place() -> None:
    assert list(flatten({"a": {"b": 0}, "c": 1, "a.b": 2})) == ["c", "a.b"]


@pytest.mark.parametrize(("keys", "stage"), [
    ({"layers": 0}, 0),
    ({"layers": 0, "layers.3": 1}, 1),
    ({"layers.3": 1, "layers": 0}, 1),
    ({"layers.3": 1, "layers.*": 0}, 1),
    ({"layers.*": 0, "layers.3": 1}, 1),
    ({"layers": 2, "layers.*": 0}, 2),
    ({"layers.*": 0, "layers.[23]": 1}, 1),
    ({"layers.[23]": 1, "layers.*": 0}, 0),
    ({"*": 0, "layers.?": 1}, 1),
    ({"layers.?": 1, "*": 0}, 1),
    ({"layers.30": 1}, None),
    ({"layers.3.attn": 1}, None),
    ({"layers.3.attn.*": 1}, None),
    ({}, None),
], ids=str)  # fmt: skip
def test_exact_beats_glob_then_deeper_beats_shallower_then_later_beats_earlier(
    keys: dict[str, int], stage: int | None
) -> None:
    assert stage_of(keys, "layers.3") == stage


def test_a_module_is_where_the_module_around_it_is() -> None:
    assert stage_of({"layers.*": 1}, "layers.3.attn.wq.weight") == 1


def test_a_glob_may_cover_several_levels() -> None:
    assert stage_of({"layers.*.attn": 1}, "layers.3.attn") == 1


def test_the_root_owns_its_own_parameters() -> None:
    assert (owner("weight"), owner("a.b.weight")) == ("", "a.b")


GOOD = {"embed": 0, "layers": 0, "norm": 1, "head": 1}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": (
        {"embed": 0, "layers.0": 0, "leyers.1": 1, "norm": 1, "head": 1},
        f"{KEY}.leyers.1: the model has no module 'leyers.1', did you mean 'layers.1'? (try: {KEY}.layers.1=1)",
    ),
    "misspelt glob": (
        {"embed": 0, "layer.*": 0, "norm": 1, "head": 1},
        f"{KEY}.layer.*: the model has no module 'layer.*', did you mean 'layers.*'? (try: {KEY}.layers.*=0)",
    ),
    "a glob without the module around it": (
        GOOD | {"?.mlp": 1},
        f"{KEY}.?.mlp: the model has no module '?.mlp', did you mean 'layers.?.mlp'? (try: {KEY}.layers.?.mlp=1)",
    ),
    "another number": (
        GOOD | {"layers.7": 1},
        f"{KEY}.layers.7: the model has no module 'layers.7'; it has embed, layers, norm, head, act",
    ),
    "unlike any": (
        GOOD | {"zzz": 0},
        f"{KEY}.zzz: the model has no module 'zzz'; it has embed, layers, norm, head, act",
    ),
    "glob unlike any": (
        GOOD | {"decoder.*": 0},
        f"{KEY}.decoder.*: the model has no module 'decoder.*'; it has embed, layers, norm, head, act",
    ),
    "too large": (
        GOOD | {"head": 2},
        f"{KEY}.head: 2: no such stage; there are stages 0..1 (parallel.pipeline.stages=2) (try: {KEY}.head=1)",
    ),
    "negative": (
        GOOD | {"embed": -1},
        f"{KEY}.embed: -1: no such stage; there are stages 0..1 (parallel.pipeline.stages=2) (try: {KEY}.embed=0)",
    ),
    "boolean": (
        GOOD | {"head": True},
        f"{KEY}.head: True is not a stage number; there are stages 0..1 (parallel.pipeline.stages=2) (try: "
        f"{KEY}.head=1)",
    ),
    "text": (
        GOOD | {"head": "1"},
        f"{KEY}.head: '1' is not a stage number; there are stages 0..1 (parallel.pipeline.stages=2) (try: "
        f"{KEY}.head=1)",
    ),
    "other text": (
        GOOD | {"head": "last"},
        f"{KEY}.head: 'last' is not a stage number; there are stages 0..1 (parallel.pipeline.stages=2) "
        f"(try: {KEY}.head=1)",
    ),
    "fraction": (
        GOOD | {"head": 1.0},
        f"{KEY}.head: 1.0 is not a stage number; there are stages 0..1 (parallel.pipeline.stages=2) (try: "
        f"{KEY}.head=1)",
    ),
    "one without": (
        {"embed": 0, "layers": 0, "head": 1},
        f"{KEY}: 'norm' has parameters but no stage (try: {KEY}.norm=0)",
    ),
    "the last without": (
        {"embed": 0, "layers.0": 0, "layers.1": 1},
        f"{KEY}: 'norm', 'head' have parameters but no stage (try: {KEY}.norm=1 {KEY}.head=1)",
    ),
    "the first without": (
        {"layers": 0, "norm": 1, "head": 1},
        f"{KEY}: 'embed' has parameters but no stage (try: {KEY}.embed=0)",
    ),
    "part of one without": (
        {"embed": 0, "layers.0.attn": 0, "layers.1": 1, "norm": 1, "head": 1},
        f"{KEY}: 'layers.0.mlp' has parameters but no stage (try: {KEY}.layers.0.mlp=0)",
    ),
    "all without": (
        {},
        f"{KEY}: 'embed', 'layers', 'norm', 'head' have parameters but no stage (try: {KEY}=auto)",
    ),
    "hole": (
        GOOD | {"norm": 0, "head": 0},
        f"{KEY}: nothing is on stage 1; there are stages 0..1 (parallel.pipeline.stages=2) (try: {KEY}=auto)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_stage_config_that_does_not_fit_the_model_is_told_why(case: str) -> None:
    config, text = WRONG[case]
    assert "\n".join(map(str, complaints(flatten(config), MODEL, 2))) == text


def test_every_wrong_key_is_reported_at_once() -> None:
    found = complaints({"embed": 7, "leyers": 0, "head": False}, MODEL, 2)
    assert [p.key for p in found] == [f"{KEY}.embed", f"{KEY}.leyers", f"{KEY}.head"]


def test_virtual_stages_are_counted_out() -> None:
    (found,) = complaints(GOOD | {"head": 8}, MODEL, 2, 2)
    assert found.text == "8: no such stage; there are stages 0..3 (parallel.pipeline.stages=2 x chunks=2)"


def test_holes_are_listed_together() -> None:
    (found,) = complaints(GOOD | {"head": 4}, MODEL, 5)
    assert found.text == "nothing is on stage 2, 3; there are stages 0..4 (parallel.pipeline.stages=5)"


def test_hundreds_of_forgotten_modules_are_one_problem() -> None:
    large = skeleton({f"layers.{i}.weight": W for i in range(200)}, containers=["layers"])
    (found,) = complaints({"layers.0": 0, "layers.199": 1}, large, 2)
    assert str(found) == (
        f"{KEY}: 'layers.1', 'layers.2', 'layers.3', 'layers.4', 'layers.5', 'layers.6' and 192 more have parameters "
        f"but no stage (try: {KEY}=auto)"
    )


def test_modules_without_parameters_and_buffers_need_no_stage() -> None:
    model = skeleton({"a.weight": W, "b.mean": W, "c.weight": W}, buffers=["b.mean"], bare=["relu"])
    assert complaints({"a": 0, "c": 1}, model, 2) == []


def test_a_parameter_of_the_root_can_be_named() -> None:
    model = skeleton({"cls": (1, 4), "a.weight": W})
    assert complaints({"cls": 0, "a": 1}, model, 2) == []
    assert str(complaints({"a": 1}, model, 2)[0]) == f"{KEY}: 'cls' has parameters but no stage (try: {KEY}.cls=1)"


CURED = {
    "misspelt": (["~{0}.layer1", "{0}.layr1=0"], 1),
    "forgotten": (["~{0}.layer2"], 0),
    "too large": (["{0}.layer3=5"], 0),
    "text": (["{0}.layer3=first"], 0),
    "against the flow": (["{0}.relu2=0"], 0),
    "hole": (["{0}.layer2=0", "{0}.relu2=0", "{0}.layer3=0"], 3),
}


@pytest.mark.parametrize("case", CURED)
def test_the_cure_of_a_wrong_stage_config_is_accepted(case: str) -> None:
    """A cure is typed in place of a misspelled key, or of all keys if it replaces the group."""
    overrides, replaced = CURED[case]
    typed = ["recipe=mlp_autoparallel", *(o.format(KEY) for o in overrides)]
    with pytest.raises(RequestError) as caught:
        plan_job(compose(typed).job)
    plan_job(compose([*typed[: len(typed) - replaced], *words(caught.value)]).job)


def test_units_are_the_children_of_the_root_and_of_containers() -> None:
    assert units(MODEL) == ("embed", "layers.0", "layers.1", "norm", "head", "act")


def test_the_largest_units_are_opened_until_there_are_enough() -> None:
    assert units(MODEL, 6) == ("embed", "layers.0.attn", "layers.0.mlp", "layers.1", "norm", "head", "act")
    assert len(units(MODEL, 100)) == 8


STACK = {f"{n}.{w}.weight": W for n in range(3) for w in ("attn", "mlp")}
AROUND = {
    "a model around a model": (
        {"m.body.embed.weight": W, **{f"m.body.layers.{n}": s for n, s in STACK.items()}, "m.head.weight": W},
        ["m.body.layers"],
        ("m.body.embed", "m.body.layers.0", "m.body.layers.1", "m.body.layers.2", "m.head"),
    ),
    "an encoder and a decoder": (
        {"m.in.weight": W, **{f"m.{part}.{n}": s for part in ("enc.block", "dec.block") for n, s in STACK.items()}},
        ["m.enc.block", "m.dec.block"],
        ("m.in", *(f"m.{part}.block.{n}" for part in ("enc", "dec") for n in range(3))),
    ),
    "experts inside a layer": (
        {f"layers.{n}.experts.{e}.weight": W for n in range(2) for e in range(4)},
        ["layers", "layers.0.experts", "layers.1.experts"],
        ("layers.0", "layers.1"),
    ),
    "two alike in a module that is mostly something else": (
        {"block.big.weight": (64, 64), "block.pair.0.weight": W, "block.pair.1.weight": W, "head.weight": W},
        ["block.pair"],
        ("block", "head"),
    ),
    "a container of unlike modules": (
        {"block.net.0.weight": W, "block.net.1.weight": (4, 9), "head.weight": W}, ["block.net"], ("block", "head"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AROUND)
def test_a_module_that_is_mostly_layers_is_opened_down_to_them(case: str) -> None:
    params, containers, found = AROUND[case]
    model = skeleton(params, containers=containers)
    assert units(model) == found
    assert set(units(model, stacks=False)) <= {p.split(".")[0] for p in params} | set(found)


def test_a_module_on_one_stage_stays_whole_and_one_on_two_is_opened() -> None:
    keys = flatten({"embed": 0, "layers": {0: 0, "1": {"attn": 0, "mlp": 1}}, "norm": 1, "head": 1})
    assert leaves(keys, MODEL) == {
        "embed", "layers.0", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "norm", "head", "act",
    }  # fmt: skip
