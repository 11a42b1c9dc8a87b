from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Entry, Strategy, merge_pipeline_strategies, merge_pipeline_strategys, single
from launcher.checkpoint.layout.strategy import match
from launcher.checkpoint.layout.strategy_file import dump, load
from launcher.checkpoint.mindspore.formats import read_strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import sharded, small, strategies, tensors

GRID = Grid.of(pp=2, dp_shard=2)


def one(layout: Layout, dtype: str = "float32", kind: Any = "param", aliases: tuple[str, ...] = ()) -> Strategy:
    return Strategy(GRID, {"w": Entry(layout, dtype, kind, aliases)})


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


def test_a_tied_tensor_is_in_the_file_of_each_of_its_stages(tmp_path: Path) -> None:
    dump(small(), tmp_path)
    listed = [json.loads((tmp_path / f"stage{s}.json").read_text())["tensors"] for s in (0, 1)]
    assert "embed.weight" in listed[0]
    assert "embed.weight" in listed[1]
    assert ["layer.weight" in rows for rows in listed] == [False, True]


def test_a_stage_without_tensors_is_no_mistake(tmp_path: Path) -> None:
    strategy = one(sharded(GRID, (4, 4), 1))
    dump(strategy, tmp_path)
    assert load(tmp_path) == strategy


@pytest.mark.parametrize("merge", [merge_pipeline_strategies, merge_pipeline_strategys])
def test_merged_stage_files_are_one_strategy(tmp_path: Path, merge: Any) -> None:
    dump(small(), tmp_path / "strategy")
    merge(str(tmp_path / "strategy"), str(tmp_path / "new" / "merged.json"))
    assert load(tmp_path / "new" / "merged.json") == small()
    merge(src_strategy_dirs=tmp_path / "strategy", dst_strategy_file=tmp_path / "strategy" / "merged.json")
    merge(tmp_path / "strategy", tmp_path / "again.json")  # the merged file is one of the parts now, and agrees
    assert (tmp_path / "again.json").read_text() == (tmp_path / "new" / "merged.json").read_text()


def merge_refusal(kind: type[Exception], src: Any, dst: Any) -> str:
    with pytest.raises(kind) as caught:
        merge_pipeline_strategies(src, dst)
    return str(caught.value)


def test_merging_needs_a_folder(tmp_path: Path) -> None:
    text = merge_refusal(NotADirectoryError, tmp_path / "no", tmp_path / "out.json")
    assert text == f"src_strategy_dirs: {tmp_path / 'no'} is not a folder"


def test_merging_needs_paths(tmp_path: Path) -> None:
    assert merge_refusal(TypeError, 3, tmp_path / "out.json") == "src_strategy_dirs: expected a path, got int"
    assert merge_refusal(TypeError, tmp_path, None) == "dst_strategy_file: expected a path, got NoneType"


def test_an_empty_folder_is_not_merged(tmp_path: Path) -> None:
    text = merge_refusal(ValueError, tmp_path, tmp_path / "out.json")
    assert text == f"src_strategy_dirs: {tmp_path} has no strategy files (.json or .ckpt)"
    assert not (tmp_path / "out.json").exists()


REAL = Path(__file__).parents[1] / "mindspore" / "fixtures" / "real_strategy"


def test_stages_that_mindspore_wrote_are_merged_as_it_does(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for rank in (0, 2):
        shutil.copy(REAL / f"pp2_strategy_rank{rank}.ckpt", tmp_path / "in")
    merge_pipeline_strategies(tmp_path / "in", tmp_path / "out.ckpt")
    got, theirs = read_strategy(tmp_path / "out.ckpt"), read_strategy(REAL / "pp2_merged.ckpt")
    assert (got.stages(), got.merged) == (theirs.stages(), True)
    text = merge_refusal(ValueError, tmp_path / "in", tmp_path / "out.json")
    told = "the files are protobuf; give a name that ends in .ckpt"
    assert text == f"dst_strategy_file: {tmp_path / 'out.json'}: {told}"


def test_two_forms_are_not_merged(tmp_path: Path) -> None:
    dump(small(), tmp_path)
    shutil.copy(REAL / "pp2_strategy_rank0.ckpt", tmp_path / "a.ckpt")
    ours, other = tmp_path / "stage0.json", tmp_path / "a.ckpt"
    text = f"two forms in one merge: {ours} is ours, {other} is MindSpore's; merge files of one form"
    assert merge_refusal(ValueError, tmp_path, tmp_path / "out.json") == text
    for path in tmp_path.glob("stage*.json"):
        path.unlink()
    shutil.copy(REAL / "json_tp4_strategy_rank0.json", tmp_path / "b.json")
    text = f"two forms in one merge: {other} is protobuf, {tmp_path / 'b.json'} is json; merge files of one form"
    assert merge_refusal(ValueError, tmp_path, tmp_path / "out.json") == text


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
    assert load_refusal(tmp_path) == f"{b}: layer.mean belongs to stages [0], not to this file's"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("{", "[", "not a strategy file: no JSON"),
        ('"launcher.strategy"', '"other"', 'not a strategy file: "format" is not "launcher.strategy"'),
        ('"version": 1', '"version": 2', "version 2; this launcher reads version 1"),
        ('"grid"', '"greed"', "a field is missing or of the wrong type: 'grid'"),
        ("[6, 4]", '[6, "4"]', "a field is missing or of the wrong type: '4' is no whole number"),
        ('["head.weight"]', '"head"', "a field is missing or of the wrong type: 'head' is no list of names"),
        ('"float32", "shape": [6, 4], "split": [["dp_shard"], []], "at": {"pp": [0, 1]}, "kind": "param"',
         '"float32", "shape": [6, 4], "split": [["dp_shard"]], "at": {"pp": [0, 1]}, "kind": "param"',
         "embed.weight: split has 1 dims, shape [6, 4] has 2"),
        ('"dp_shard": 2', '"dp_shard": 99999999999',
         "grid {'pp': 2, 'dp_replicate': 1, 'dp_shard': 99999999999, 'tp': 1}: 199999999998 ranks; "
         "at most 1048576 are laid out"),
    ],
    ids=["json", "format", "version", "field", "type", "list", "flaw", "ranks"],
)  # fmt: skip
def test_a_bad_strategy_file_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    a, _ = dump(small(), tmp_path)
    edited(a, old, new)
    assert load_refusal(tmp_path) == f"{a}: {text}"


FLAWS: dict[str, tuple[Any, str]] = {
    "axis": (lambda: one(Layout(GRID, (4,), (("tp",),))), "w: axis tp is not in the grid {'pp': 2, 'dp_shard': 2}"),
    "twice": (
        lambda: one(Layout(GRID, (4, 4), (("dp_shard",), ("dp_shard",)))),
        "w: axis dp_shard cuts it and is used a second time",
    ),
    "cut and pinned": (
        lambda: one(Layout(GRID, (4,), (("pp",),), (("pp", (0,)),))), "w: axis pp cuts it and is used a second time"
    ),
    "coordinate": (
        lambda: one(sharded(GRID, (4,), 2)), "w: at pp [2]: coordinates are ascending, below 2, and at least one"
    ),
    "dtype": (
        lambda: one(sharded(GRID, (4,), 1), "float31"),
        "w: dtype float31 is not known; known are float64, int64, complex64, float32, int32, float16, bfloat16, int16, "
        "float8_e4m3fn, float8_e5m2, int8, uint8, bool, uint16, uint32, uint64",
    ),
    "kind": (lambda: one(sharded(GRID, (4,), 1), kind="weight"), "w: kind weight is none of param, buffer, optim"),
    "names": (lambda: one(sharded(GRID, (4,), 1), aliases=("w",)), "w: the name of two tensors"),
    "grid": (
        lambda: one(sharded(Grid.of(dp_shard=2, pp=2), (4,), 1)),
        "w: laid out over {'dp_shard': 2, 'pp': 2}, the strategy over {'pp': 2, 'dp_shard': 2}",
    ),
    "size": (
        lambda: Strategy(Grid.of(pp=0), {}), "grid {'pp': 0}: axes need different names and sizes of at least 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "text"), FLAWS.values(), ids=FLAWS.keys())
def test_a_strategy_that_cannot_be_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert str(caught.value) == text


def test_strategies_of_different_tensors_are_told_apart_name_by_name() -> None:
    src = small()
    entries = dict(src.entries)
    del entries["layer.mean"]
    entries["new"] = replace(entries.pop("optim.step"), kind="param")
    entries["layer.weight"] = replace(entries["layer.weight"], dtype="float32")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        match(src, Strategy(src.grid, entries))
    assert str(caught.value) == (
        "the strategies do not fit:\n"
        "  layer.weight: bfloat16 in the source, float32 in the destination; a dtype is never changed here\n"
        "  only in the source: layer.mean, optim.step\n"
        "  only in the destination: new"
    )


def test_two_tensors_do_not_become_one_tied_tensor() -> None:
    src = small()
    entries = dict(src.entries)
    untied = Strategy(src.grid, entries | {"embed.weight": replace(entries["embed.weight"], aliases=()),
                                           "head.weight": replace(entries["embed.weight"], aliases=())})  # fmt: skip
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        match(untied, src)
    assert str(caught.value) == (
        "the strategies do not fit:\n"
        "  embed.weight: one tied tensor in the destination, 2 in the source: embed.weight, head.weight"
    )
    assert match(src, untied)["head.weight"] == "embed.weight"


def test_shapes_that_differ_are_named() -> None:
    src, dst = one(sharded(GRID, (4,), 1)), one(sharded(GRID, (5,), 1))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        match(src, dst)
    assert str(caught.value) == "the strategies do not fit:\n  w: shape [4] in the source, [5] in the destination"


def test_single_is_everything_whole_on_one_rank() -> None:
    got = single(small())
    assert got.grid.size == 1
    assert {n: e.layout.axes for n, e in got.entries.items()} == dict.fromkeys(small().entries, ())
    assert {n: e.spec for n, e in got.entries.items()} == {n: e.spec for n, e in small().entries.items()}
