from __future__ import annotations

import pytest

from launcher.extras.mindspore.merge_strategies import merge
from launcher.extras.mindspore.strategy import OperatorParts, Slicing, StrategyFile
from tests.extras.mindspore.truth import exactly

ROWS = Slicing((2,), ((0,), ()), shape=(4, 4))


def file_of(layouts: dict[str, Slicing], stage: int = 0) -> StrategyFile:
    return StrategyFile(2, (OperatorParts("op", stage, ((1, 2), (2,))),), layouts)


def test_a_name_that_looks_like_a_stage_does_not_make_a_file_a_merged_one() -> None:
    file = file_of({"0-w": ROWS, "1-w": ROWS}, 3)
    assert not file.merged
    assert file.stages() == {3: {"0-w": ROWS, "1-w": ROWS}}


def test_a_stage_without_parameters_of_its_own_is_merged_all_the_same() -> None:
    merged = merge([("a", file_of({"w": ROWS})), ("b", file_of({}, 1))])
    assert merged.stages() == {0: {"w": ROWS}, 1: {}}


def test_files_of_several_ranks_of_a_stage_are_one_when_they_agree() -> None:
    a, b = file_of({"w": ROWS, "v": ROWS}), file_of({"v": ROWS, "w": ROWS})
    assert merge([("a", a), ("b", b)]).stages() == {0: {"w": ROWS, "v": ROWS}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [("a", file_of({"w": ROWS})), ("b", file_of({"w": Slicing((2,), ((), (0,)))}))],
            "a and b are both of stage 0 and disagree on w",
        ),
        (
            [("a", file_of({"w": ROWS})), ("b", file_of({"v": ROWS}, 3))],
            "a, b: stage 1, 2 of 4 is missing; give the files of every stage",
        ),
        ([("a", file_of({"w": ROWS}, 900))], "a: stage 0 and more of 901 is missing; give the files of every stage"),
        (
            [("a", StrategyFile(2, (), {"w": ROWS}))],
            "a: lists no operator, so the stage of the file is unknown",
        ),
        (
            [("a", merge([("x", file_of({"w": ROWS}))]))],
            "a: already merged; give the files of single stages",
        ),
    ],
)
def test_stages_that_do_not_belong_together_are_refused(parts: list[tuple[str, StrategyFile]], message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        merge(parts)


def test_operators_of_several_stages_need_names_with_stages() -> None:
    file = StrategyFile(1, (OperatorParts("a", 0), OperatorParts("b", 1)), {"0-w": ROWS, "v": ROWS})
    with pytest.raises(
        ValueError, match=exactly("operators of stages [0, 1], but names of parameters without a stage in front")
    ):
        file.stages()
    with pytest.raises(ValueError, match=r"\Astage 1 of 3 is missing\Z"):
        StrategyFile(1, (), {"0-w": ROWS, "2-v": ROWS}).stages()
