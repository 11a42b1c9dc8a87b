"""Automatic stages never separate modules that run between two calls of one module."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RequestError
from launcher.plan.cut.inseparable_modules import components
from launcher.plan.cut.stages import cut, place
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.plan import Plan, ask, plan
from launcher.plan.values.model_graph import Graph, Node
from tests.plan.made import chain, graph, job, skeleton, spec, words

KEY = "parallel.pipeline.stage_config"
PP2 = ["launch.nproc=2", "parallel.pipeline.stages=2"]
W = (64, 64)
MODEL = skeleton({f"{m}.weight": W for m in "abcd"})


def again(*calls: str) -> Graph:
    """A chain in which modules are called more than once."""
    names = [f"{m}{i}" for i, m in enumerate(calls)]
    before = ["x", *names]
    rows = [f"{n}: module {m} < {p}" for n, m, p in zip(names, calls, before, strict=False)]
    return graph("x: input x", *rows, f"output: output output < {names[-1]}")


def planned(glue: Graph, *overrides: str) -> Plan:
    j = job(*overrides)
    return plan(j, ask(j), TracedModel(MODEL, glue, ("a", "b", "c", "d")))


def refusal(glue: Graph, *overrides: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        planned(glue, *overrides)
    return caught.value


def test_modules_that_are_called_once_are_alone_and_in_order() -> None:
    assert components(chain("a", "b", "c"), "abc") == (("a",), ("b",), ("c",))


def test_modules_between_two_calls_of_one_module_stay_with_it() -> None:
    assert components(again("a", "b", "c", "a", "d"), "abcd") == (("a", "b", "c"), ("d",))
    assert components(again("a", "b", "b", "c"), "abc") == (("a",), ("b",), ("c",))


def test_a_module_that_is_called_again_on_what_is_late_is_late_itself() -> None:
    glue = graph(
        "x: input x", "a: module a < x", "b: module b < x", "c: module c < b", "e: module a < c",
        "s: glue add < a e", "output: output output < s",
    )  # fmt: skip
    assert components(glue, "abc") == (("b",), ("c",), ("a",))


def test_glue_that_takes_no_tensor_from_a_module_stays_with_it() -> None:
    glue = graph(
        "x: input x", "a: module a < x", "g: glue pick < a", "b: module b < x", "c: module c < b", "h: glue get < g c",
        "output: output output < h", out={"a": None, "g": None},
    )  # fmt: skip
    assert components(glue, "abc") == (("b",), ("c",), ("a",))


def test_glue_that_changes_a_module_keeps_with_it_what_it_depends_on_and_what_follows() -> None:
    nodes = (
        Node("x", "input", "x", (), (spec(2, 4),)),
        Node("a", "module", "a", ("x",), (spec(2, 4),), reads=frozenset({1})),
        Node("b", "module", "b", ("a",), (spec(2, 4),), reads=frozenset({2})),
        Node("g", "glue", "copy_", ("b",), (spec(2, 4),), reads=frozenset({1}), writes=frozenset({1})),
        Node("c", "module", "c", ("b",), (spec(2, 4),)),
        Node("output", "output", "output", ("c",), (spec(2, 4),)),
    )
    assert components(Graph(nodes), "abc") == (("a", "b"), ("c",))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=12))
def test_stages_of_groups_in_their_order_are_never_against_the_flow(calls: list[tuple[str, int, int]]) -> None:
    """Each call takes two of the last four values.

    Each group has its own stage, which is the strictest cut.
    """
    names, rows = ["x"], ["x: input x"]
    for i, (m, p, q) in enumerate(calls):
        ins = {names[-1 - p % len(names)], names[-1 - q % len(names)]}
        names.append(f"{m}{i}")
        rows.append(f"{names[-1]}: module {m} < {' '.join(sorted(ins))}")
    glue = graph(*rows, f"output: output output < {names[-1]}")
    groups = components(glue, list(dict.fromkeys(m for m, _, _ in calls)))
    at, found = place(glue, {m: i for i, g in enumerate(groups) for m in g}, len(groups) - 1)
    assert found == []
    assert cut(glue, at, len(groups), skeleton({f"{m}.weight": W for g in groups for m in g}))[1] == []
    for g in groups:  # no group has a module that could be outside
        for m in g if len(g) > 1 else ():
            one = {k: 0 if k == m else 1 for k in g}
            other = {k: 1 if k == m else 0 for k in g}
            assert all(place(glue, told, 1)[1] for told in (one, other))


def test_automatic_stages_keep_together_what_no_cut_can_separate_and_say_so() -> None:
    made = planned(again("a", "b", "c", "a", "d"), *PP2)
    assert [s.modules for s in made.stages] == [("a", "b", "c"), ("d",)]
    assert f"{KEY} auto: 'a', 'b', 'c' on one stage, because 'a' is called again after 'c'" in map(str, made.notes)


TOGETHER = "'a', 'b', 'c' must be on one stage, because 'a' is called again after 'c'"
LEFT = f"the model has 4 modules with parameters; {TOGETHER}; that leaves 2 parts, too few for"
TOO_FEW = {
    "interleave": (
        [*PP2, "parallel.pipeline.interleave=true"],
        f"parallel.pipeline.interleave: {LEFT} 4 stages (try: parallel.pipeline.interleave=false)",
    ),
    "a scheduler in the form of a V": (
        [*PP2, "parallel.pipeline.scheduler=zero_bubble_v"],
        f"parallel.pipeline.scheduler: {LEFT} 4 stages (try: parallel.pipeline.scheduler=1f1b)",
    ),
    "stages": (
        ["launch.nproc=4", "parallel.pipeline.stages=4"],
        f"parallel.pipeline.stages: {LEFT} 4 stages (try: parallel.pipeline.stages=2)",
    ),
    "nothing that fits": (
        ["launch.nproc=3", "parallel.pipeline.stages=3", "train.batch_size=33", "parallel.pipeline.micro_batch_num=33"],
        f"parallel.pipeline.stages: {LEFT} 3 stages; use fewer stages",
    ),
}


@pytest.mark.parametrize("case", TOO_FEW)
def test_too_few_groups_are_refused_with_what_keeps_them_together(case: str) -> None:
    overrides, text = TOO_FEW[case]
    glue = again("a", "b", "c", "a", "d")
    error = refusal(glue, *overrides)
    assert str(error) == text
    if words(error):
        planned(glue, *overrides, *words(error))


def test_explicit_stages_that_separate_them_are_refused_with_the_fewest_moves() -> None:
    glue, told = again("a", "b", "c", "a", "d"), f"{KEY}={{a: 0, b: 0, c: 1, d: 1}}"
    error = refusal(glue, *PP2, told)
    assert str(error) == (
        f"{KEY}: 'a' is on stage 0 but needs the output of 'c' on stage 1; {TOGETHER} (try: {KEY}.c=0)"
    )
    assert [s.modules for s in planned(glue, *PP2, told, *words(error)).stages] == [("a", "b", "c"), ("d",)]


NO_CURE = {
    "a stage would be empty": ["launch.nproc=3", "parallel.pipeline.stages=3", "train.batch_size=36",
                               f"{KEY}={{a: 0, b: 0, c: 1, d: 2}}"],
}  # fmt: skip


@pytest.mark.parametrize("case", NO_CURE)
def test_no_cure_if_no_move_helps(case: str) -> None:
    assert str(refusal(again("a", "b", "c", "a", "d"), *NO_CURE[case])) == (
        f"{KEY}: 'a' is on stage 0 but needs the output of 'c' on stage 1; {TOGETHER}; use fewer stages"
    )


def test_a_cure_that_a_deeper_key_would_outdo_is_not_offered() -> None:
    told = f"{KEY}={{a: 0, b: 0, c.weight: 1, d: 1}}"
    assert "(try:" not in str(refusal(again("a", "b", "c", "a", "d"), *PP2, told))
