from __future__ import annotations

import pytest

from launcher.errors import Problem
from tests.plan.made import refusal

TP = "parallel.grid.tp"
REFUSED = {
    "parallel.operators.head={weight: [tp, null]}": Problem(
        TP, "null: parallel.operators names the axis tp, but no setting says how many ranks it has", f"{TP}=2"
    ),
    f"{TP}=2": Problem(TP, "2: parallel.operators cuts nothing over tp", "operators=megatron"),
    f"{TP}=4 parallel.operators.head={{in: [[1,1,2],[2,1]]}}": Problem(
        TP, "4: parallel.operators cuts into 2 slices", f"{TP}=2"
    ),
}


def test_a_model_without_strategies_is_sent_to_the_search_for_them():
    text = "2: parallel.operators cuts nothing over tp; set there how each operator is cut, or let "
    text += "parallel.mode=recursive_programming choose, for any model"
    found = refusal(f"{TP}=2", "model=mlp", "data=mnist5k", "steps=[train]", "launch.nproc=4").problems
    assert found == (Problem(TP, text, "parallel.mode=recursive_programming"),)


@pytest.mark.parametrize("words", REFUSED)
def test_a_degree_that_nothing_or_two_things_say_is_refused_before_the_model_is_built(words):
    overrides = words.split(" ", 1) if words.startswith(TP) else [words]
    assert refusal(*overrides, "launch.nproc=4").problems == (REFUSED[words],)
