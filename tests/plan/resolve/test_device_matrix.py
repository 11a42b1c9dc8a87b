"""Which engine splits the operators, and why."""

from __future__ import annotations

import pytest

from launcher.plan.plan import ask
from launcher.plan.resolve.device_matrix import choose_engine, over_slices
from launcher.plan.values.resolved import OVER_TP, EngineChoice
from tests.plan.made import job

UP = "parallel.operators={layers.0.mlp.up: %s}"
REASONS = {
    "a search": (("parallel.mode=sharding_propagation",), "parallel.mode=sharding_propagation searches for strategies"),
    "axes of its own": (
        (UP % "{matrix: [2, 2], axes: [x, y], in: [[x], [y]]}",),
        "parallel.operators has device matrices",
    ),
    "no size of tp": ((UP % "{in: [[4, 1], [1, 1]]}",), "the slices of parallel.operators imply no size of tp"),
    "other samples": (
        (UP % "{in: [[8, 1], [2, 1]]}", "launch.nproc=4"),
        "parallel.operators cuts samples into slices that match no axis",
    ),
}


@pytest.mark.parametrize(("overrides", "why"), REASONS.values(), ids=REASONS)
def test_device_matrices_are_chosen_for_a_reason(overrides: tuple[str, ...], why: str) -> None:
    assert choose_engine(job(*overrides)) == EngineChoice("device_matrix", why)


def test_one_axis_tp_is_the_choice_wherever_it_will_do() -> None:
    asked = job(UP % "{weight: [tp, null]}", "parallel.grid.tp=2", "launch.nproc=2")
    assert choose_engine(asked) == OVER_TP
    assert ask(asked).sizes.engine == OVER_TP


def test_slices_go_over_matrices_only_where_they_do_not_already() -> None:
    asked = job(UP % "{in: [[1, 1], [2, 1]]}", "launch.nproc=2")
    matrices = over_slices(asked, OVER_TP)
    assert matrices is not None
    assert matrices.over_matrices
    assert over_slices(asked, matrices) is None
    assert ask(asked, engine=matrices).sizes.grid["tp"] == 2


def test_a_file_of_layouts_says_how_many_ranks_there_are_at_least() -> None:
    assert ask(job("launch.nproc=null"), engine=EngineChoice("device_matrix", ranks_at_least=4)).sizes.grid.size == 4
