from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Entry, Strategy
from launcher.checkpoint.layout.strategy_file import dump, load
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import sharded, small, strategies, tensors


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_strategy_comes_back_from_its_stage_files(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("strategy")
    strategy = data.draw(strategies(data.draw(tensors())))
    dump(strategy, folder)
    again = load(folder)
    assert again == strategy
    assert again.digest == strategy.digest


def test_a_stage_file_has_a_line_a_tensor(tmp_path: Path) -> None:
    dump(small(), tmp_path)
    assert (tmp_path / "stage0.json").read_text() == (
        "{\n"
        '  "format": "launcher.strategy",\n'
        '  "version": 1,\n'
        '  "stages": [0],\n'
        '  "grid": {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 1},\n'
        '  "tensors": {\n'
        '    "embed.weight": {"dtype": "float32", "shape": [6, 4], "split": [["dp_shard"], []],'
        ' "at": {"pp": [0, 1]}, "kind": "param", "aliases": ["head.weight"]},\n'
        '    "optim.embed.weight.exp_avg": {"dtype": "float32", "shape": [6, 4], "split": [["dp_shard"], []],'
        ' "at": {"pp": [0, 1]}, "kind": "optim", "aliases": []},\n'
        '    "optim.step": {"dtype": "int64", "shape": [], "split": [], "at": {}, "kind": "optim", "aliases": []}\n'
        "  }\n"
        "}\n"
    )


def test_a_layout_over_a_device_matrix_of_its_own_has_it_in_its_line(tmp_path: Path) -> None:
    grid, matrix = Grid.of(pp=2, dp_shard=8), Grid.of(pp=2, x=2, y=4)
    strided = Entry(Layout(matrix, (8, 2), (("y", "x"), ()), (("pp", (0,)),)), "float32")
    strategy = Strategy(grid, {"u": strided, "v": Entry(sharded(grid, (8,), 0), "float32")})
    dump(strategy, tmp_path)
    assert load(tmp_path) == strategy
    assert (tmp_path / "stage0.json").read_text() == (
        "{\n"
        '  "format": "launcher.strategy",\n'
        '  "version": 2,\n'
        '  "stages": [0],\n'
        '  "grid": {"pp": 2, "dp_shard": 8},\n'
        '  "tensors": {\n'
        '    "u": {"dtype": "float32", "shape": [8, 2], "split": [["y", "x"], []], "at": {"pp": [0]},'
        ' "kind": "param", "aliases": [], "grid": {"pp": 2, "x": 2, "y": 4}},\n'
        '    "v": {"dtype": "float32", "shape": [8], "split": [["dp_shard"]], "at": {"pp": [0]},'
        ' "kind": "param", "aliases": []}\n'
        "  }\n"
        "}\n"
    )


def test_the_order_of_axes_counts_in_the_digest() -> None:
    digests = {
        Strategy(Grid.of(d=8), {"w": Entry(Layout(grid, (8,), (("x", "y"),)), "float32")}).digest
        for grid in (Grid.of(x=2, y=4), Grid.of(y=4, x=2))
    }
    assert len(digests) == 2


def test_a_tied_tensor_is_in_the_file_of_each_of_its_stages(tmp_path: Path) -> None:
    dump(small(), tmp_path)
    listed = [json.loads((tmp_path / f"stage{s}.json").read_text())["tensors"] for s in (0, 1)]
    assert "embed.weight" in listed[0]
    assert "embed.weight" in listed[1]
    assert ["layer.weight" in rows for rows in listed] == [False, True]


def test_a_stage_without_tensors_is_no_mistake(tmp_path: Path) -> None:
    grid = Grid.of(pp=2, dp_shard=2)
    strategy = Strategy(grid, {"w": Entry(sharded(grid, (4, 4), 1), "float32")})
    dump(strategy, tmp_path)
    assert load(tmp_path) == strategy


def load_refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 callers compare the whole message
        load(path)
    return str(caught.value)


def test_stages_that_disagree_on_a_tied_tensor_are_named_with_both_sides(tmp_path: Path) -> None:
    a, b = dump(small(), tmp_path)
    edited(b, '"shape": [6, 4], "split": [["dp_shard"], []], "at": {"pp": [0, 1]}, "kind": "param"',
           '"shape": [6, 8], "split": [["dp_shard"], []], "at": {"pp": [0, 1]}, "kind": "param"')  # fmt: skip
    row = '{"dtype": "float32", "shape": [6, %d], "split": [["dp_shard"], []], "at": {"pp": [0, 1]},'
    row += ' "kind": "param", "aliases": ["head.weight"]}'
    assert load_refusal(tmp_path) == f"{a} and {b} disagree on embed.weight: {row % 4} and {row % 8}"


def test_stages_that_disagree_on_the_grid_are_named(tmp_path: Path) -> None:
    a, b = dump(small(), tmp_path)
    edited(b, '"tp": 1', '"tp": 2')
    grid = "{'pp': 2, 'dp_replicate': 1, 'dp_shard': 2, 'tp': %d}"
    assert load_refusal(tmp_path) == f"{a} and {b} disagree on the grid: {grid % 1} and {grid % 2}"


def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    a, b = dump(small(), tmp_path)
    text = f"{b}: stage 0 of 2 is missing; put the strategy file of every stage into one folder"
    assert load_refusal(b) == text
    a.unlink()
    assert load_refusal(tmp_path) == text


def test_of_many_stages_that_are_missing_the_first_are_named(tmp_path: Path) -> None:
    a, _ = dump(small(), tmp_path)
    edited(a, '"pp": 2', '"pp": 500000')
    listed = ", ".join(map(str, range(1, 21)))
    text = f"{a}: stage {listed} and more of 500000 is missing; put the strategy file of every stage into one folder"
    assert load_refusal(a) == text


def test_a_tied_tensor_that_one_of_its_stages_does_not_list_is_named(tmp_path: Path) -> None:
    a, b = dump(small(), tmp_path)
    b.write_text("".join(line for line in b.read_text().splitlines(True) if '"embed.weight"' not in line))
    assert load_refusal(tmp_path) == f"{b}: embed.weight is missing; {a} says that stage 1 holds it too"


def test_a_tensor_in_the_file_of_a_stage_that_does_not_hold_it_is_named(tmp_path: Path) -> None:
    _, b = dump(small(), tmp_path)
    edited(b, '"at": {"pp": [1]}, "kind": "buffer"', '"at": {"pp": [0]}, "kind": "buffer"')
    assert load_refusal(tmp_path) == f"{b}: layer.mean belongs to stages [0], but this file is for stages [1]"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("{", "[", "not a strategy file: not JSON"),
        ('"launcher.strategy"', '"other"', 'not a strategy file: "format" is not "launcher.strategy"'),
        ('"version": 1', '"version": 3', "version 3; this launcher reads versions 1 and 2"),
        ('"version": 1', '"version": true', "version True; this launcher reads versions 1 and 2"),
        ('"grid"', '"greed"', "a field is missing or of the wrong type: 'grid'"),
        ("[6, 4]", '[6, "4"]', "a field is missing or of the wrong type: '4' is not a whole number"),
        ('["head.weight"]', '"head"', "a field is missing or of the wrong type: 'head' is not a list of names"),
        ('"float32", "shape": [6, 4], "split": [["dp_shard"], []], "at": {"pp": [0, 1]}, "kind": "param"',
         '"float32", "shape": [6, 4], "split": [["dp_shard"]], "at": {"pp": [0, 1]}, "kind": "param"',
         "embed.weight: split has 1 dims, shape [6, 4] has 2"),
        ('"dp_shard": 2', '"dp_shard": 99999999999',
         "grid {'pp': 2, 'dp_replicate': 1, 'dp_shard': 99999999999, 'tp': 1}: 199999999998 ranks; "
         "at most 1048576 are supported"),
    ],
    ids=["json", "format", "version", "version of no number", "field", "type", "list", "flaw", "ranks"],
)  # fmt: skip
def test_a_bad_strategy_file_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    a, _ = dump(small(), tmp_path)
    edited(a, old, new)
    assert load_refusal(tmp_path) == f"{a}: {text}"
