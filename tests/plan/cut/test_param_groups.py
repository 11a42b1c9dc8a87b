"""``optim.groups``: every trainable parameter is in one group, matched as for stages; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job.schema.components import Optim
from launcher.job.schema.optim import SGD, Adafactor, AdamW, Lion, Muon
from launcher.job.schema.user_class import Target
from launcher.plan.cut.param_groups import notes, param_groups, param_problems, rows
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.model_graph import Role
from launcher.plan.values.module_names import best_key
from launcher.plan.values.tensor_spec import TensorSpec
from tests.optim.grouped import tensor

MODEL = [
    tensor("embed.weight", "head.weight", shape=(8, 4)),
    *(tensor(f"layers.{i}.{n}", shape=s) for i in range(3) for n, s in (
        ("attn.q.weight", (4, 4)), ("attn.q.bias", (4,)), ("norm.weight", (4,)),
    )),
    tensor("norm.weight", shape=(4,)),
    tensor("still.weight", shape=(4, 4), trainable=False),
    tensor("norm.mean", shape=(4,), trainable=False, buffer=True),
]  # fmt: skip
TRAINED = [p.name for p in MODEL if p.trainable]


def adamw(groups: dict[str, Any], **more: Any) -> AdamW:
    return AdamW(name="adamw", groups=groups, **more)


def of(optim: Optim) -> dict[str, dict[str, Any]]:
    """The settings of each parameter."""
    return {name: dict(g.settings) for g in param_groups(optim, MODEL) for name in g.names}


def keys(groups: dict[str, Any]) -> dict[str, str]:
    return {name: g.key for g in param_groups(adamw(groups), MODEL) for name in g.names}


def test_without_groups_matrices_decay_and_vectors_do_not() -> None:
    found = param_groups(adamw({}), MODEL)
    usual = (("lr", 3e-4), ("betas", (0.9, 0.95)), ("eps", 1e-8))
    assert [(g.key, g.settings, len(g.names)) for g in found] == [
        ("", (*usual, ("weight_decay", 0.1)), 4),
        ("", (*usual, ("weight_decay", 0.0)), 7),
    ]


@pytest.mark.parametrize(("groups", "parameter", "key"), [
    ({"layers": {"lr": 1}, "layers.1": {"lr": 2}}, "layers.1.norm.weight", "layers.1"),
    ({"layers.1": {"lr": 2}, "layers": {"lr": 1}}, "layers.1.norm.weight", "layers.1"),
    ({"layers.1": {"lr": 2}, "layers.?": {"lr": 1}}, "layers.1.norm.weight", "layers.1"),
    ({"*.bias": {"lr": 2}, "layers.*": {"lr": 1}}, "layers.0.attn.q.bias", "layers.*"),
    ({"layers.*": {"lr": 1}, "*.bias": {"lr": 2}}, "layers.0.attn.q.bias", "*.bias"),
    ({"layers.*.attn.*": {"lr": 1}, "*.bias": {"lr": 2}}, "layers.0.attn.q.bias", "layers.*.attn.*"),
    ({"*norm": {"lr": 1}}, "layers.2.norm.weight", "*norm"),
    ({"*norm": {"lr": 1}}, "norm.weight", "*norm"),
    ({"*.norm": {"lr": 1}}, "norm.weight", ""),
    ({"layers": {0: {"attn": {"lr": 1}}}}, "layers.0.attn.q.weight", "layers.0.attn"),
    ({"layers.0": {"lr": 1}, "*": {"lr": 2}, "layers": {0: {"eps": 1}}}, "layers.0.norm.weight", "layers.0"),
], ids=str)  # fmt: skip
def test_an_exact_name_beats_a_glob_a_deeper_one_a_shallower_and_a_later_one_an_earlier(
    groups: dict[str, Any], parameter: str, key: str
) -> None:
    assert keys(groups)[parameter] == key


NAMES = st.sampled_from([
    "embed", "head.weight", "layers", "layers.0", "layers.1.norm", "layers.*", "*.bias", "*norm*", "*", "layers.[02].*",
])  # fmt: skip
OWN = st.fixed_dictionaries(
    {}, optional={"lr": st.sampled_from([0.0, 1.0]), "weight_decay": st.sampled_from([0.0, 1.0])}
)


@given(st.dictionaries(NAMES, OWN, max_size=4))
def test_every_trainable_parameter_is_in_exactly_one_group_with_the_settings_of_its_key(groups: dict[str, Any]) -> None:
    optim = adamw(groups)
    found = [(name, g) for g in param_groups(optim, MODEL) for name in g.names]
    assert sorted(name for name, _ in found) == sorted(TRAINED)
    for name, group in found:
        if name != "embed.weight":
            assert group.key == (best_key(optim.groups, name) or "")
        settings = dict(group.settings)
        own = groups.get(group.key, {})
        assert {k: settings[k] for k in own} == own
        assert settings.keys() == {"lr", "betas", "eps", "weight_decay"}


def test_a_group_has_what_it_says_and_the_rest_of_the_optimizer() -> None:
    optim = adamw({"*.bias": {"weight_decay": 0.5}, "embed": {"lr": 1e-5, "betas": [0.5, 0.6]}}, lr=0.01, eps=1e-6)
    assert of(optim)["layers.0.attn.q.bias"] == {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.5}
    assert of(optim)["embed.weight"] == {"lr": 1e-5, "betas": (0.5, 0.6), "eps": 1e-6, "weight_decay": 0.1}
    assert of(optim)["norm.weight"] == {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}


@pytest.mark.parametrize("optim", [
    SGD(name="sgd", groups={"embed": {"momentum": 0.5}}), Lion(name="lion", groups={"embed": {"betas": [0, 0.5]}}),
], ids=["sgd", "lion"])  # fmt: skip
def test_each_optimizer_has_settings_of_its_own(optim: SGD | Lion) -> None:
    assert of(optim)["embed.weight"] == of(optim)["layers.0.attn.q.weight"] | optim.groups["embed"].model_dump()


def test_a_class_of_the_users_own_gets_all_parameters_together() -> None:
    (group,) = param_groups(Target.model_validate({"_target_": "mine.Optimizer"}), MODEL)
    assert (group.key, group.settings, list(group.names)) == ("", (), TRAINED)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": (
        {"embd": {"lr": 0.001}},
        "optim.groups.embd: {lr: 0.001}: it names no trained parameter; nearest: embed "
        "(try: 'optim.groups.embed={lr:0.001}')",
    ),
    "a misspelt glob": (
        {"*.biass": {"weight_decay": 0}},
        "optim.groups.*.biass: {weight_decay: 0}: it names no trained parameter; nearest: *.bias "
        "(try: 'optim.groups.*.bias={weight_decay:0}')",
    ),
    "of another model": (
        {"decoder.*": {"lr": 1, "betas": [0.5, 0.9]}},
        "optim.groups.decoder.*: {lr: 1, betas: [0.5, 0.9]}: it names no trained parameter; "
        "these are in embed, head, layers, norm",
    ),
    "a layer too far": (
        {"layers.3": {"lr": 1}},
        "optim.groups.layers.3: {lr: 1}: it names no trained parameter; these are in embed, head, layers, norm",
    ),
    "frozen": (
        {"still": {"lr": 1}}, "optim.groups.still: {lr: 1}: it matches no trained parameter; still.weight is frozen",
    ),
    "a buffer": (
        {"norm.mean": {"lr": 1}},
        "optim.groups.norm.mean: {lr: 1}: it matches no trained parameter; norm.mean is a buffer",
    ),
    "a tensor in two groups": (
        {"embed.*": {"lr": 1}, "head": {"lr": 2}},
        "optim.groups.head: embed.weight = head.weight is one tensor, updated once, but embed.weight is in "
        "embed.*={lr: 1}, head.weight is in head={lr: 2} (try: 'optim.groups.head.weight={lr:1}')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_group_that_cannot_be_is_refused(case: str) -> None:
    groups, text = REFUSED[case]
    assert [*map(str, param_problems(adamw(groups), MODEL))] == [text]


def test_the_cure_for_a_tensor_in_two_groups_is_one() -> None:
    groups = {"embed.*": {"lr": 1}, "head": {"lr": 2}, "head.weight": {"lr": 1}}
    assert [*param_problems(adamw(groups), MODEL)] == []
    assert of(adamw(groups))["embed.weight"]["lr"] == 1


@pytest.mark.parametrize("groups", [
    {"embed": {"lr": 1}}, {"head": {"lr": 1}}, {"embed": {"lr": 1}, "*": {"lr": 1}},
    {"embed": {"lr": 1}, "head": {"lr": 1, "weight_decay": 0.1}},
], ids=str)  # fmt: skip
def test_names_without_a_group_say_nothing_and_two_groups_may_say_the_same(groups: dict[str, Any]) -> None:
    assert [*param_problems(adamw(groups), MODEL)] == []
    assert of(adamw(groups))["embed.weight"]["lr"] == 1


def test_a_plan_says_which_parameters_a_group_is_of() -> None:
    optim = adamw(
        {"layers.*": {"lr": 1}, "head": {"eps": 1e-6}, "*.bias": {"weight_decay": 0}, "layers.?.*": {"lr": 2}}
    )
    assert [(s.key, s.value, s.status, s.why) for s in rows(optim, MODEL)] == [
        (
            "optim.groups.layers.*", "{lr: 1}", "degraded",
            "its parameters are in more specific or later groups",
        ),
        ("optim.groups.head", "{eps: 1e-06}", "applied", "to 1 parameter: embed.weight"),
        (
            "optim.groups.*.bias", "{weight_decay: 0}", "degraded",
            "its parameters are in more specific or later groups",
        ),
        (
            "optim.groups.layers.?.*", "{lr: 2}", "applied",
            "to 9 parameters: layers.0.attn.q.weight, layers.0.attn.q.bias, layers.0.norm.weight, "
            "layers.1.attn.q.weight, .., layers.2.attn.q.weight, layers.2.attn.q.bias, layers.2.norm.weight",
        ),
    ]  # fmt: skip
    text = "head.weight is one tensor with embed.weight, so the group applies to all its names"
    assert [*map(str, notes(optim, MODEL))] == [f"optim.groups.head {text}"]
    assert [*notes(adamw({"*": {"lr": 1}}), MODEL)] == []


def test_two_groups_that_say_the_same_of_a_tied_tensor_are_both_applied() -> None:
    optim = adamw({"embed": {"lr": 1}, "head": {"lr": 1}})
    assert [(s.status, s.why) for s in rows(optim, MODEL)] == [("applied", "to 1 parameter: embed.weight")] * 2


ROLES: dict[str, Role] = {"embed.weight": "embedding", "score.weight": "head"}
PARTED = [
    *(replace(p, role=ROLES.get(p.name, "")) for p in MODEL),
    replace(tensor("score.weight", shape=(2, 4)), role="head"), tensor("patch.weight", shape=(4, 3, 2, 2)),
]  # fmt: skip


def muon(groups: dict[str, Any]) -> Muon:
    return Muon(name="muon", groups=groups)


@pytest.mark.parametrize(("groups", "by_muon"), [
    ({}, "layers.0.attn.q layers.1.attn.q layers.2.attn.q"),
    ({"*": {"use": "muon"}}, "embed layers.0.attn.q layers.1.attn.q layers.2.attn.q score"),
    ({"layers": {"use": "adamw"}, "layers.1": {"momentum": 0.5}, "score": {"use": "muon"}}, "layers.1.attn.q score"),
    ({"head.weight": {"use": "muon"}}, "embed layers.0.attn.q layers.1.attn.q layers.2.attn.q"),
], ids=str)  # fmt: skip
def test_muon_updates_matrices_that_are_no_embedding_and_no_head_or_those_that_groups_name(
    groups: dict[str, Any], by_muon: str
) -> None:
    found = {n: dict(g.settings) for g in param_groups(muon(groups), PARTED) for n in g.names}
    assert sorted(n for n, s in found.items() if s["use"] == "muon") == sorted(f"{n}.weight" for n in by_muon.split())


def test_each_of_muons_two_optimizers_has_its_own_settings() -> None:
    groups = {"layers.0": {"lr": 1, "momentum": 0.5, "eps": 1e-3}, "*norm": {"betas": [0.5, 0.5], "weight_decay": 1}}
    found = {n: dict(g.settings) for g in param_groups(muon(groups), PARTED) for n in g.names}
    usual = {"use": "muon", "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "ns_dtype": "float32"}
    assert found["layers.1.attn.q.weight"] == usual
    assert found["layers.0.attn.q.weight"] == usual | {"lr": 1, "momentum": 0.5}
    rest = {"use": "adamw", "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert found["embed.weight"] == found["patch.weight"] == rest
    assert found["layers.0.attn.q.bias"] == rest | {"lr": 1, "eps": 1e-3, "weight_decay": 0.0}
    assert found["norm.weight"] == rest | {"betas": (0.5, 0.5), "weight_decay": 1}
    low = [replace(p, compute="bfloat16") for p in PARTED]
    assert {dict(g.settings).get("ns_dtype") for g in param_groups(muon({}), low)} == {"bfloat16", None}


def test_a_plan_says_what_muon_updates() -> None:
    assert [*map(str, notes(muon({}), PARTED))] == [
        "optim.name muon updates 3 parameters of 2 dims, Newton-Schulz in float32; adamw the rest: embed.weight, "
        "score.weight, 8 of other dims"
    ]


COMPLEX = [*PARTED, replace(tensor("wave", shape=(4, 4)), spec=TensorSpec((4, 4), "complex64"))]


@pytest.mark.parametrize(("optim", "params", "told"), [
    (muon({"*norm": {"use": "muon"}}), PARTED,
     "optim.groups.*norm: {use: muon}: it names no matrix, but Muon updates only matrices",
     ), (muon({"*norm": {"momentum": 0.5, "lr": 1}}), PARTED,
     "optim.groups.*norm: {lr: 1, momentum: 0.5}: momentum is for muon, but adamw updates all of this group: "
     "layers.0.norm.weight",
     ), (muon({"layers.*.q.weight": {"betas": [0.5, 0.5]}}), PARTED,
     "optim.groups.layers.*.q.weight: {betas: [0.5, 0.5]}: betas is for adamw, but muon updates all of this group: "
     "layers.0.attn.q.weight",
     ), (muon({"embed": {"use": "muon"}, "head": {"use": "adamw"}}), PARTED,
     "optim.groups.head: embed.weight = head.weight is one tensor, updated once, but embed.weight is in embed="
     "{use: muon}, head.weight is in head={use: adamw}",
     ),
    (Adafactor(name="adafactor"), COMPLEX,
     "optim.name: adafactor: it updates only real numbers, but wave is complex64"),
    (muon({}), COMPLEX, "optim.name: muon: it updates only real numbers, but wave is complex64"),
], ids=["no matrix", "not muon's", "not adamw's", "tied", "adafactor, complex", "muon, complex"])  # fmt: skip
def test_settings_that_nothing_takes_are_refused(optim: Optim, params: list[Placed], told: str) -> None:
    assert [f"{p.key}: {p.text}" for p in param_problems(optim, params)] == [told]


@pytest.mark.parametrize(("groups", "cure"), [
    ({"*norm": {"use": "muon", "lr": 1}}, "'optim.groups.*norm={lr:1,use:adamw}'"),
    ({"*norm": {"momentum": 0.5, "lr": 1}}, "'optim.groups.*norm={lr:1}'"),
    ({"*norm": {"momentum": 0.5}}, ""),
], ids=str)  # fmt: skip
def test_the_cure_keeps_what_can_be_applied(groups: dict[str, Any], cure: str) -> None:
    assert [p.cure for p in param_problems(muon(groups), PARTED)] == [cure]


def test_adafactors_least_variance_is_that_of_the_dtype() -> None:
    wide = [replace(p, spec=TensorSpec(p.spec.shape, "float64")) for p in PARTED[:1]]
    for params, least in ((PARTED, 2.0**-23), (wide, 2.0**-52)):
        assert dict(param_groups(Adafactor(name="adafactor"), params)[0].settings)["eps"] == (least, 1e-3)
