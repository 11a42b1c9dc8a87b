from __future__ import annotations

from launcher.plan.cut.stages import Stage, boundary, covers, cut, place
from launcher.plan.values.model_graph import Graph, ModelStructure
from tests.plan.made import chain, graph, skeleton, spec

KEY = "parallel.pipeline.stage_config"
ABC = skeleton({"a.weight": (4,), "b.weight": (4,), "c.weight": (4,)})


def stages(glue: Graph, told: dict[str, int], count: int, model: ModelStructure = ABC) -> tuple[Stage, ...]:
    at, found = place(glue, told, count - 1)
    assert found == []
    made, found = cut(glue, at, count, model)
    assert found == []
    return made


def wrong(glue: Graph, told: dict[str, int], count: int, model: ModelStructure = ABC) -> list[str]:
    at, found = place(glue, told, count - 1)
    return [str(p) for p in found or cut(glue, at, count, model)[1]]


def test_a_name_covers_itself_and_what_is_below_it() -> None:
    assert [covers("a.b", n) for n in ("a.b", "a.b.c", "a.bc", "a")] == [True, True, False, False]
    assert covers("", "anything")


def test_a_chain_is_cut_where_stage_config_says() -> None:
    first, second = stages(chain("a", "b", "c"), {"a": 0, "b": 0, "c": 1}, 2)
    assert first == Stage(0, ("x", "v0", "v1"), (), ("v1",), ("a", "b"), ("a.weight", "b.weight"), 20, 16)
    assert second == Stage(1, ("v2", "output"), ("v1",), (), ("c",), ("c.weight",), 10, 8)


def test_unassigned_modules_go_with_their_input() -> None:
    first, second = stages(chain("a", "relu", "b", "c", "drop"), {"a": 0, "b": 1, "c": 1}, 2)
    assert (first.modules, second.modules) == (("a", "relu"), ("b", "c", "drop"))


def test_glue_goes_with_the_latest_of_its_inputs() -> None:
    glue = graph("x: input x", "a: module a < x", "b: module b < a", "s: glue add < a b", "output: output output < s")
    at, _ = place(glue, {"a": 0, "b": 1}, 1)
    assert at["s"] == 1


def test_the_output_is_on_the_last_stage_whatever_makes_it() -> None:
    glue = graph("x: input x", "a: module a < x", "b: module b < x", "output: output output < a")
    assert place(glue, {"a": 0, "b": 1}, 1)[0]["output"] == 1


def test_data_that_would_flow_backwards_names_the_edge() -> None:
    assert wrong(chain("a", "b", "c"), {"a": 0, "b": 1, "c": 0}, 2) == [
        f"{KEY}.c: 'c' is on stage 0 but needs the output of 'b' on stage 1; data flows from lower to higher stages "
        f"only (try: {KEY}.c=1)"
    ]


def test_an_edge_out_of_the_glue_is_named_by_what_the_glue_does() -> None:
    glue = graph("x: input x", "a: module a < x", "s: glue relu < a", "b: module b < s", "output: output output < b")
    assert wrong(glue, {"a": 1, "b": 0}, 2, skeleton({"a.weight": (4,), "b.weight": (4,)})) == [
        f"{KEY}.b: 'b' is on stage 0 but needs the output of glue 'relu' on stage 1; data flows from lower to higher "
        f"stages only (try: {KEY}.a=0 {KEY}.b=1)"
    ]


SKIP = graph(
    "x: input x",
    "a: module a < x",
    "b: module b < a",
    "c: module c < b",
    "s: glue add < c a",
    "output: output output < s",
)


def test_a_skip_connection_is_carried_through_the_stages_between() -> None:
    made = stages(SKIP, {"a": 0, "b": 1, "c": 2}, 3)
    assert [s.sends for s in made] == [("a",), ("a", "b"), ()]
    assert [s.receives for s in made] == [(), ("a",), ("a", "b")]


def test_an_input_that_is_used_late_is_carried_too() -> None:
    glue = graph(
        "x: input x", "mask: input mask", "a: module a < x", "b: module b < a", "c: module c < b mask",
        "output: output output < c",
    )  # fmt: skip
    assert [s.sends for s in stages(glue, {"a": 0, "b": 1, "c": 2}, 3)] == [("mask", "a"), ("mask", "b"), ()]


def test_a_tuple_crosses_as_its_tensors() -> None:
    two = (spec(2, 4), spec(2, dtype="int64"))
    glue = graph("x: input x", "a: module a < x", "b: module b < a", "output: output output < b", out={"a": two})
    both = stages(glue, {"a": 0, "b": 1}, 2, skeleton({"a.weight": (4,), "b.weight": (4,)}))
    (crossing,) = boundary(glue, both, 0)
    assert (crossing.name, crossing.specs, crossing.packed) == ("a", two, True)


NUMBERS = graph(
    "x: input x", "a: module a < x", "size: glue size < x", "half: glue floordiv < size", "b: module b < a",
    "view: glue view < b half", "output: output output < view", out={"size": None, "half": None},
)  # fmt: skip


def test_numbers_are_worked_out_again_where_they_are_needed() -> None:
    first, second = stages(NUMBERS, {"a": 0, "b": 1}, 2, skeleton({"a.weight": (4,), "b.weight": (4,)}))
    assert first.nodes == ("x", "a", "size", "half")
    assert second.nodes == ("size", "half", "b", "view", "output")
    assert first.sends == ("x", "a")


def test_a_value_that_is_no_tensor_and_no_number_cannot_cross_a_boundary() -> None:
    glue = graph("x: input x", "a: module a < x", "b: module b < a", "output: output output < b", out={"a": None})
    assert wrong(glue, {"a": 0, "b": 1}, 2) == [
        f"{KEY}: 'a' on stage 0 passes a value that is not a dense tensor to 'b' on stage 1; put both on one stage"
    ]


def test_a_stage_holds_what_its_modules_and_its_glue_use() -> None:
    model = skeleton({"pos": (4,), "a.weight": (4,), "a.inner.weight": (4,), "b.weight": (4,)})
    glue = graph(
        "x: input x", "pos: param pos", "a: module a < x", "s: glue add < a pos", "b: module b < s",
        "t: glue mul < b pos", "output: output output < t",
    )  # fmt: skip
    first, second = stages(glue, {"a": 0, "b": 1}, 2, model)
    assert first.params == ("pos", "a.weight", "a.inner.weight")
    assert second.params == ("pos", "b.weight")
    assert "pos" not in first.sends


POS = graph(
    "x: input x",
    "pos: param pos",
    "a: module a < x",
    "s: glue add < a pos",
    "b: module b < s",
    "output: output output < b",
)
WITH_POS = skeleton({"pos": (4,), "a.weight": (4,), "b.weight": (4,)})


def test_glue_follows_a_parameter_that_stage_config_assigns() -> None:
    first, second = stages(POS, {"a": 0, "b": 1, "pos": 1}, 2, WITH_POS)
    assert (first.params, second.params) == (("a.weight",), ("pos", "b.weight"))


def test_a_parameter_that_is_used_after_its_stage_is_refused() -> None:
    assert wrong(POS, {"a": 1, "b": 1, "pos": 0}, 2, WITH_POS) == [
        f"{KEY}.pos: 'pos' is on stage 0 but is first used on stage 1 (try: {KEY}.pos=1)"
    ]


def test_tensors_that_the_forward_never_uses_would_be_on_no_stage() -> None:
    model = skeleton({f"{m}.weight": (4,) for m in "abcdefg"})
    assert wrong(chain("a", "b"), {"a": 0, "b": 1}, 2, model) == [
        "model: the forward never uses c.weight, d.weight, e.weight and 2 more, so no stage of the pipeline would "
        f"hold them; remove them from the model, or use one stage (try: parallel.pipeline.stages=1 {KEY}=auto)"
    ]


def test_a_tied_name_that_is_never_called_is_held_under_its_other_name() -> None:
    model = skeleton({"a.weight": (4,), "b.weight": (4,), "unused.weight": (4,)}, same={"unused.weight": "a.weight"})
    stages(chain("a", "b"), {"a": 0, "b": 1}, 2, model)
