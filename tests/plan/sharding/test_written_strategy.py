"""Strategies over device matrices are read as they were written, or refused with the place that is wrong."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.operators import operator_file
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.sharding.written_strategy import FORM, as_written, read

MATMUL = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 216), ("k", 216), ("n", 216)), sums=("k",))
NORM = OpRule((("b", ""), ("",)), (("b", ""),), (("b", 24),))
ISSUE: dict[str, Any] = {"matrix": [2, 4], "axes": ["x", "y"], "in": [["x", "y"], ["y", None]], "out": [["x", None]]}


def test_the_form_of_a_layout_gives_letters_their_axes() -> None:
    got = read(ISSUE, MATMUL, 8)
    assert got.strategy.of == {"m": (0,), "k": (1,)}
    assert got.outs == (TensorLayout((2, 4), ((0,), ())),)
    assert got.strategy.makes(MATMUL, 0) == TensorLayout((2, 4), ((0,), ()), partial=(1,))


def test_an_output_may_leave_in_another_layout_than_it_comes_out() -> None:
    got = read({**ISSUE, "out": [["x", "y"]]}, MATMUL, 8)
    assert got.strategy.of == {"m": (0,), "k": (1,)}
    assert got.outs == (TensorLayout((2, 4), ((0,), (1,))),)


def test_what_no_input_says_follows_the_output() -> None:
    got = read({"matrix": [2, 4], "axes": ["x", "y"], "out": [["x", "y"]]}, MATMUL, 8)
    assert got.strategy.of == {"m": (0,), "n": (1,)}


def test_ranks_that_the_matrix_leaves_repeat_the_work_on_the_right() -> None:
    assert read(ISSUE, MATMUL, 16).strategy.matrix == (2, 4, 2)
    assert read(ISSUE, MATMUL, 16).outs[0] == TensorLayout((2, 4, 2), ((0,), ()))


@st.composite
def strategies(draw: st.DrawFn) -> OpStrategy:
    matrix = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(matrix))))
    homes = [draw(st.sampled_from(["m", "k", "n", ""])) for _ in axes]
    cut = {letter: tuple(a for a, home in zip(axes, homes, strict=True) if home == letter) for letter in "mkn"}
    return OpStrategy(matrix, tuple((letter, dims) for letter, dims in cut.items() if dims))


@given(strategies())
def test_what_is_written_is_read_back_through_a_file(strategy: OpStrategy) -> None:
    text = operator_file.text({"up": {**as_written(strategy, MATMUL), "key": "u*"}}, tp=None)
    tp, rows = operator_file.parsed(json.loads(text), "parallel.operator_strategy.load", "o.json")
    got = read(rows["up"], MATMUL, prod(strategy.matrix))
    assert (tp, rows["up"].key) == (None, "u*")
    assert (got.strategy.matrix, got.strategy.of) == (strategy.matrix, strategy.of)
    assert got.outs == (strategy.makes(MATMUL, 0).summed(),)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "form": ({"in": [[2, 4]]}, f"{{'in': [[2, 4]]}}: not of the form {FORM}"),
    "sizes": ({**ISSUE, "matrix": [2, 0]}, f"matrix [2, 0], axes ['x', 'y']: not of the form {FORM}"),
    "names": ({**ISSUE, "axes": ["x", "x"]}, "axes ['x', 'x']: not a name of its own for each of [2, 4]"),
    "ranks": ({**ISSUE, "matrix": [3, 4]}, "matrix [3, 4]: 12 do not divide the 8 ranks of a stage"),
    "axis": ({**ISSUE, "in": [["x", "z"]]}, "in[0][1]: 'z' is no axis; there are x, y and null"),
    "twice": ({**ISSUE, "in": [["x", "x"]]}, "in[0]: axis x cuts it twice"),
    "two dims": ({**ISSUE, "in": [["x", None], [None, "x"]], "out": []}, "in[1][1]: axis x cuts in[0][0] already"),
    "disagree": ({**ISSUE, "in": [["x", "y"], ["x", None]]}, "in[1][0]: the same dim as in[0][1], and not cut like it"),
    "tensors": ({**ISSUE, "in": [[None] * 2] * 3}, "in: 3 tensors; there are 2"),
    "no tensors": ({**ISSUE, "in": ["x"]}, "in: ['x']: not a list with a list a tensor"),
    "dims": ({**ISSUE, "in": [["x"]]}, "in[0]: 1 entries for 2 dims"),
}


@pytest.mark.parametrize(("value", "told"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_named_by_its_place(value: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read(value, MATMUL, 8)
    assert str(caught.value) == told


def test_a_dim_that_every_rank_needs_is_not_cut() -> None:
    with pytest.raises(ValueError, match=r"^in\[0\]\[1\]: each rank needs all of this dim$"):
        read({"matrix": [2], "axes": ["x"], "in": [[None, "x"]]}, NORM, 2)


def test_parts_are_even() -> None:
    with pytest.raises(ValueError, match=r"^in\[0\]\[0\]: 216 elements do not divide into 5 parts$"):
        read({"matrix": [5], "axes": ["x"], "in": [["x", None]]}, MATMUL, 5)
