from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import (
    Blob,
    Strategy,
    rank_list_for_transform,
    read_full,
    single,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from launcher.checkpoint.foreign.recognize_strategy import open_strategy as read
from launcher.checkpoint.layout.strategy_file import text
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.shapes_of_slices import of_full_tensors
from launcher.extras.mindspore.strategy_file import write_strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, cut, files, filled, save, small, strategies, tensors, write_file
from tests.extras.mindspore.small_net import net
from tests.extras.mindspore.truth import CASES, blobs, rank_files

WRONG = {"c16_bug_opt_shard_ascending_map"}  # MindSpore wrote wrong values
Files = dict[int, dict[str, Blob]]


def plain(folder: Path, strategy: Strategy, full: dict[str, bytes], name: str = "net-1_1") -> None:
    """Write one file per rank with all tensors of the rank, as other programs do."""
    for rank in range(strategy.grid.size):
        home = folder / f"rank_{rank}"
        home.mkdir(parents=True, exist_ok=True)
        write_file(home / f"{name}.safetensors", blobs_of_rank(strategy, rank, full), {"format": "ms"})


def written(folder: Path) -> Files:
    return {int(p.parent.name.removeprefix("rank_")): dict(read_full(p)) for p in folder.glob("rank_*/*.safetensors")}


def strategy_text(path: Path, strategy: Strategy) -> str:
    path.write_text(text(strategy, tuple(range(strategy.stages))))
    return str(path)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_rank_gets_its_piece_of_the_full_tensors(data: st.DataObject) -> None:
    of = data.draw(tensors())
    a, b = data.draw(strategies(of)), data.draw(strategies(of))
    full = filled(a)
    with TemporaryDirectory() as made:
        home = Path(made)
        plain(home / "a", a, full)
        src, dst = strategy_text(home / "a.json", a), strategy_text(home / "b.json", b)
        transform_checkpoints(str(home / "a"), str(home / "b"), "out", src, dst, 2, "safetensors")
        assert written(home / "b") == {rank: blobs_of_rank(b, rank, full) for rank in range(b.grid.size)}
        for rank in range(b.grid.size):
            ranks = rank_list_for_transform(rank, src, dst)
            assert ranks == sorted(ranks, reverse=True)
            paths = {r: str(home / "a" / f"rank_{r}" / "net-1_1.safetensors") for r in ranks or [0]}
            one = home / "one" / f"{rank}.safetensors"
            transform_checkpoint_by_rank(rank, paths, str(one), src, dst)
            assert one.read_bytes() == (home / "b" / f"rank_{rank}" / f"out{rank}.safetensors").read_bytes()


def as_held(folder: Path) -> Files:
    return {rank: blobs(path) for rank, path in rank_files(folder).items()}


def sides(case: Path) -> dict[str, str | None]:
    return {side: next(iter(map(str, case.glob(f"{side}_strategy.*"))), None) for side in ("src", "dst")}


@pytest.mark.parametrize("output", ["safetensors", "ckpt"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_files_of_mindspore_are_transformed_to_the_expected_files(tmp_path: Path, case: Path, output: str) -> None:
    given, out = sides(case), tmp_path / "out"
    transform_checkpoints(str(case / "src"), str(out), "out", given["src"], given["dst"], output_format=output)
    got = as_held(out)
    assert {p.suffix for p in rank_files(out).values()} == {f".{output}"}
    expected = as_held(case / "expected")
    if case.name not in WRONG:
        assert {r: {n: b for n, b in got[r].items() if n in expected[r]} for r in expected} == expected
    if case.name != "c24_by_stage_path":
        full = read_full(case / "full.safetensors")
        whole = {n: blob.spec for n, blob in full.items()}
        dst = of_full_tensors(loaded, whole) if (loaded := read("dst", given["dst"])) else None
        src = of_full_tensors(loaded, whole) if (loaded := read("src", given["src"])) else None
        target = dst or single(src)
        for rank in range(target.grid.size):
            want = {n: cut(bytes(full[n].data), e.spec, box) for n, e in target.entries_of(rank).items()
                    if (box := e.layout.box(rank)) is not None}  # fmt: skip
            assert {n: b for n, b in got[rank].items() if n in want} == want
            assert got[rank].keys() - want.keys() <= {"epoch_num", "global_step", "learning_rate"}


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "c24_by_stage_path"], ids=lambda case: case.name)
def test_one_rank_is_made_from_the_files_of_its_rank_list_alone(tmp_path: Path, case: Path) -> None:
    given, files = sides(case), rank_files(case / "src")
    transform_checkpoints(str(case / "src"), str(tmp_path / "out"), "out", given["src"], given["dst"])
    theirs = json.loads((case / "case.json").read_text()).get("rank_list_for_transform", {})
    for rank, want in as_held(tmp_path / "out").items():
        ranks = rank_list_for_transform(rank, given["src"], given["dst"])
        assert ranks == sorted(ranks, reverse=True)
        if isinstance(theirs.get(str(rank)), list):
            assert len(ranks) <= len(theirs[str(rank)])
        one = tmp_path / f"{rank}.ckpt"
        chosen = {r: str(files[r]) for r in ranks}
        transform_checkpoint_by_rank(rank, chosen, str(one), given["src"], given["dst"])
        assert blobs(one) == want


def tp(n: int, *names: str) -> Strategy:
    """Return a strategy of matrices split by rows over ``n`` ranks, and of one replicated vector."""
    from launcher.checkpoint import Entry

    grid = Grid.of(tp=n)
    rows = {name: Entry(Layout(grid, (8, 2), (("tp",), ())), "float32") for name in names or ("w",)}
    return Strategy(grid, {**rows, "norm": Entry(Layout(grid, (4,), ((),)), "float32")})


@pytest.mark.parametrize(
    ("before", "after", "lists"),
    [
        (8, 4, [[1, 0], [3, 2], [5, 4], [7, 6]]),
        (4, 2, [[1, 0], [3, 2]]),
        (2, 4, [[0], [0], [1], [1]]),
        (4, 1, [[3, 2, 1, 0]]),
        (4, 4, [[0], [1], [2], [3]]),
    ],
)
def test_only_the_ranks_that_are_needed_are_listed(
    tmp_path: Path, before: int, after: int, lists: list[list[int]]
) -> None:
    src, dst = strategy_text(tmp_path / "a.json", tp(before)), strategy_text(tmp_path / "b.json", tp(after))
    assert [rank_list_for_transform(rank, src, dst) for rank in range(after)] == lists
    if after == 1:
        assert rank_list_for_transform(0, src) == lists[0]


def test_a_full_checkpoint_is_on_rank_0(tmp_path: Path) -> None:
    assert rank_list_for_transform(3, None, strategy_text(tmp_path / "b.json", tp(4))) == [0]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Write ``a/rank_<k>`` for 4 ranks, the strategy ``a.json``, and ``b.json`` for 2 ranks."""
    plain(tmp_path / "a", tp(4), filled(tp(4)))
    strategy_text(tmp_path / "a.json", tp(4))
    strategy_text(tmp_path / "b.json", tp(2))
    return tmp_path


def call(home: Path, **other: Any) -> None:
    given = {"src_checkpoints_dir": home / "a", "dst_checkpoints_dir": home / "b", "ckpt_prefix": "out",
             "src_strategy_file": home / "a.json", "dst_strategy_file": home / "b.json",
             "output_format": "safetensors"}  # fmt: skip
    transform_checkpoints(**{**given, **other})


def test_the_highest_step_counts_as_a_number(home: Path) -> None:
    for name, seed in (("net-10_5", 5), ("net-9_7", 7)):
        plain(home / "a", tp(4), filled(tp(4), seed), name)
    call(home)
    assert written(home / "b") == {r: blobs_of_rank(tp(2), r, filled(tp(4), 5)) for r in (0, 1)}


def test_ranks_of_different_steps_are_not_mixed(home: Path) -> None:
    """A training that was killed during a save leaves the newest step on some ranks only."""
    for rank in range(4):
        (file,) = (home / "a" / f"rank_{rank}").iterdir()
        file.rename(file.with_name("net-1_10.safetensors"))
    shutil.copy(home / "a/rank_0/net-1_10.safetensors", home / "a/rank_0/net-1_20.safetensors")
    text = (
        f"{home}/a/rank_0/net-1_20.safetensors and {home}/a/rank_1/net-1_10.safetensors: files of different steps do "
        "not form one model; keep in each folder the file of one step that all ranks have"
    )
    assert refusal(lambda: call(home)) == text
    (home / "a/rank_0/net-1_10.safetensors").unlink()
    assert refusal(lambda: call(home)) == text

    # if all ranks have both, the newest counts; the first number may be the rank
    for rank in range(4):
        folder = home / "a" / f"rank_{rank}"
        (file,) = folder.iterdir()
        shutil.copy(file, folder / f"net_{rank}_20.safetensors")
        file.rename(folder / f"net_{rank}_10.safetensors")
    call(home)
    assert written(home / "b") == {r: blobs_of_rank(tp(2), r, filled(tp(4))) for r in (0, 1)}


@pytest.mark.parametrize("names", [("x", "y"), ("x-1", "y-1"), ("net-1_1", "net-2")], ids=["none", "same", "mixed"])
def test_files_that_do_not_say_which_is_newer_are_refused(home: Path, names: tuple[str, str]) -> None:
    for path in (home / "a" / "rank_0").iterdir():
        path.unlink()
    for name in names:
        (home / "a" / "rank_0" / f"{name}.safetensors").touch()
    told = ", ".join(f"{name}.safetensors" for name in names)
    text = f"{home / 'a' / 'rank_0'}: no newest file: {told} do not end in different steps; keep one"
    assert refusal(lambda: call(home)) == text


def test_a_checkpoint_of_ours_brings_its_strategy_along(tmp_path: Path) -> None:
    full = filled(small())
    save(tmp_path / "a", small(), full)
    transform_checkpoints(str(tmp_path / "a"), str(tmp_path / "b"), "out", output_format="safetensors")
    assert written(tmp_path / "b") == {0: blobs_of_rank(single(small()), 0, full)}
    other = strategy_text(tmp_path / "x.json", single(small()))
    text = f"src_strategy_file: not the strategy that {tmp_path / 'a'} was saved with; give None to use that one"
    assert refusal(lambda: transform_checkpoints(str(tmp_path / "a"), str(tmp_path / "c"), "out", other)) == text


def test_written_files_can_be_read_again_and_swapped_ones_are_named(home: Path) -> None:
    call(home)
    call(home, src_checkpoints_dir=home / "b", dst_checkpoints_dir=home / "c", src_strategy_file=home / "b.json",
         dst_strategy_file=None)  # fmt: skip
    assert written(home / "c") == {0: blobs_of_rank(single(tp(4)), 0, filled(tp(4)))}
    one, two = (home / "b" / f"rank_{r}" / f"out{r}.safetensors" for r in (0, 1))
    shutil.copy(one, home / "x")
    shutil.copy(two, one)
    shutil.copy(home / "x", two)
    found = refusal(lambda: call(home, src_checkpoints_dir=home / "b", dst_checkpoints_dir=home / "d",
                                 src_strategy_file=home / "b.json", dst_strategy_file=None))  # fmt: skip
    assert found == (
        f"{one}: a file of another rank or layout: it says rank 1, not 0\n"
        f"{two}: a file of another rank or layout: it says rank 0, not 1"
    )


@pytest.mark.parametrize("form", ["ours", "protobuf", "json"])
@pytest.mark.parametrize("written_in", ["ours", "protobuf", "json"])
def test_files_belong_to_their_layout_in_whatever_form_it_is_given(tmp_path: Path, written_in: str, form: str) -> None:
    a, b = net(2, 2), net(4)
    plain(tmp_path / "a", a, filled(a))
    before, first, again = (given_in(tmp_path / f"{i}-{f}", f, s) for i, (f, s) in
                            enumerate([("ours", a), (written_in, b), (form, b)]))  # fmt: skip
    transform_checkpoints(tmp_path / "a", tmp_path / "b", "out", before, first, output_format="safetensors")
    transform_checkpoints(tmp_path / "b", tmp_path / "c", "out", again, output_format="safetensors")
    assert written(tmp_path / "c") == {0: blobs_of_rank(single(a), 0, filled(a))}
    shutil.copy(tmp_path / "b/rank_1/out1.safetensors", tmp_path / "b/rank_0/out0.safetensors")
    stale = given_in(tmp_path / "stale", form, net(4, swapped=True))
    file = f"{tmp_path}/b/rank_0/out0.safetensors: a file of another rank or layout: it says"
    # MindSpore's JSON has shapes, which these files contradict
    says = "give the files and the strategy of one save" if form == "json" else f"{file} strategy {b.meaning}, not "
    for strategy, told in ((again, f"{file} rank 1, not 0"), (stale, says)):
        found = refusal(lambda of=strategy: transform_checkpoints(tmp_path / "b", tmp_path / "d", "out", of))  # type: ignore[misc]
        assert told in found
    assert not (tmp_path / "d").exists()


def given_in(path: Path, form: str, strategy: Strategy) -> str:
    """Write a strategy file in one of the three forms, and return its path."""
    if form == "ours":
        return strategy_text(path, strategy)
    write_strategy(path, merged_file(strategy), "json" if form == "json" else "protobuf")
    return str(path)


def replaced(rank: int, act: Callable[[dict[str, Blob]], object]) -> Callable[[Path], None]:
    def change(home: Path) -> None:
        path = home / "a" / f"rank_{rank}" / "net-1_1.safetensors"
        tensors = blobs_of_rank(tp(4), rank, filled(tp(4)))
        act(tensors)
        write_file(path, tensors, {})

    return change


def number(value: bytes) -> Blob:
    return Blob.of("int8", (), value)


LISTED = "give files of one save, and a strategy that lists it, saved with only_trainable_params=False"
BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "rank missing": (lambda home: shutil.rmtree(home / "a/rank_3"), {},
                     "the source strategy has 4 ranks; no folder for rank 3"),
    "file missing": (lambda home: (home / "a/rank_3/net-1_1.safetensors").unlink(), {},
                     "{home}/a/rank_3: no .safetensors or .ckpt file in it"),
    "stale rank": (lambda home: shutil.copytree(home / "a/rank_0", home / "a/rank_4"), {},
                   "{home}/a/rank_4/net-1_1.safetensors: rank 4 is not in the source strategy's world of 4"),
    "no ranks": (lambda home: (home / "empty").mkdir(), {"src_checkpoints_dir": "{home}/empty"},
                 "{home}/empty: it has no rank_<k> folders"),
    "two formats": (lambda home: (home / "a/rank_3/net-1_1.safetensors").rename(home / "a/rank_3/net.ckpt"), {},
                    "{home}/a/rank_0/net-1_1.safetensors and {home}/a/rank_3/net.ckpt: "
                    "two formats in one source; give files of one format"),
    "mixed": (lambda home: (home / "a/rank_3/net.ckpt").touch(), {},
              "{home}/a/rank_3/net-1_1.safetensors and net.ckpt: two formats in one folder; keep files of one format"),
    "name missing": (replaced(2, lambda t: t.pop("w")), {},
                     "{home}/a/rank_2/net-1_1.safetensors: not in the file, but on rank 2 in the strategy: w"),
    "name unknown": (replaced(2, lambda t: t.update(v=t["w"])), {},
                     "{home}/a/rank_2/net-1_1.safetensors: "
                     "in the file, but not on rank 2 in the strategy: v"),
    "shape": (replaced(2, lambda t: t.update(w=Blob.of("float32", (4,), bytes(16)))), {},
              "{home}/a/rank_2/net-1_1.safetensors: tensor w is float32[4], the strategy says float32[2, 2]"),
    "dtype": (replaced(2, lambda t: t.update(w=Blob.of("int32", (2, 2), bytes(16)))), {},
              "{home}/a/rank_2/net-1_1.safetensors: tensor w is int32[2, 2], the strategy says float32[2, 2]"),
    "other model": (lambda home: strategy_text(home / "b.json", tp(2, "v")), {},
                    "the strategies do not match:\n  only in the source: w\n  only in the destination: v"),
    "loose": (lambda home: [replaced(r, lambda t, r=r: t.update(step=number(bytes([r > 1]))))(home)  # type: ignore[misc]
                            for r in range(4)], {},
              "{home}/a/rank_2/net-1_1.safetensors: step is in no strategy, and differs from its value on rank 0; "
              f"{LISTED}\n"
              "{home}/a/rank_3/net-1_1.safetensors: step is in no strategy, and differs from its value on rank 0; "
              f"{LISTED}"),
    "no strategy": (lambda home: None, {"src_strategy_file": None, "dst_strategy_file": None},
                    "src_strategy_file and dst_strategy_file are both None: there is no other layout to write"),
    "not full": (lambda home: None, {"src_strategy_file": None},
                 "src_strategy_file is None: then all ranks must have the same full checkpoint, but w of rank 1 "
                 "differs from rank 0; give the strategy file that they were saved with, "
                 "or {home}/a/rank_0/net-1_1.safetensors alone"),
    "no rank 0": (lambda home: shutil.rmtree(home / "a/rank_0"), {"src_strategy_file": None},
                  "src_strategy_file is None: then rank 0 must have a full checkpoint, but there is no folder rank_0"),
    "absent": (lambda home: None, {"dst_strategy_file": "{home}/x.json"},
               "dst_strategy_file: {home}/x.json: no such file"),
    "prefix": (lambda home: None, {"ckpt_prefix": "../evil"},
               "ckpt_prefix: '../evil' leaves the rank's folder; give the start of a file name"),
    "no process": (lambda home: None, {"process_num": 0}, "process_num: 0 is less than 1"),
    "to npz": (lambda home: None, {"output_format": "npz"},
               "output_format: 'npz' is not known; give safetensors or ckpt"),
    "into itself": (lambda home: None, {"dst_checkpoints_dir": "{home}/a"},
                    "{home}/a: the destination and the source {home}/a are the same folder, or one is in the other"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_nothing_is_written(home: Path, case: str) -> None:
    change, other, text = BAD[case]
    change(home)
    before = files(home)
    given = {key: v.format(home=home) if isinstance(v, str) else v for key, v in other.items()}
    assert refusal(lambda: call(home, **given)) == text.format(home=home)
    assert files(home) == before


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        ({"src_checkpoints_dir": 1}, TypeError, "src_checkpoints_dir: expected a path, got int"),
        ({"src_checkpoints_dir": "{home}/x"}, NotADirectoryError, "src_checkpoints_dir: {home}/x is not a folder"),
        ({"dst_checkpoints_dir": "{home}/a.json"}, NotADirectoryError,
         "dst_checkpoints_dir: {home}/a.json is not a folder"),
        ({"src_strategy_file": 1}, TypeError, "src_strategy_file: expected a path or None, got int"),
        ({"ckpt_prefix": 1}, TypeError, "ckpt_prefix: expected str, got int"),
        ({"process_num": True}, TypeError, "process_num: expected int, got bool"),
    ],
)  # fmt: skip
def test_types_are_those_of_mindspore(home: Path, other: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {key: v.format(home=home) if isinstance(v, str) else v for key, v in other.items()}
    assert refusal(lambda: call(home, **given), kind) == text.format(home=home)


def test_a_destination_that_is_not_empty_is_refused(home: Path) -> None:
    (home / "b" / "rank_7").mkdir(parents=True)
    text = f"{home / 'b'}: the destination is not empty; give another"
    assert refusal(lambda: call(home), FileExistsError) == text


def test_step_counters_go_to_every_rank(home: Path) -> None:
    for rank in range(4):
        replaced(rank, lambda t: t.update(step=number(b"x")))(home)
    call(home)
    assert [got["step"] for got in written(home / "b").values()] == [number(b"x")] * 2


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (("0",), TypeError, "rank_id: expected int, got str"),
        ((True,), TypeError, "rank_id: expected int, got bool"),
        ((-1,), ValueError, "rank_id: -1 is not in the destination's world of 2"),
        ((2,), ValueError, "rank_id: 2 is not in the destination's world of 2"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(home: Path, given: tuple[Any], kind: type[Exception], text: str) -> None:
    assert refusal(lambda: rank_list_for_transform(*given, home / "a.json", home / "b.json"), kind) == text


def by_rank(home: Path, **other: Any) -> None:
    paths = {r: str(home / "a" / f"rank_{r}" / "net-1_1.safetensors") for r in (2, 3)}
    given = {"rank_id": 1, "checkpoint_files_map": paths, "save_checkpoint_file_name": str(home / "one.safetensors"),
             "src_strategy_file": home / "a.json", "dst_strategy_file": home / "b.json"}  # fmt: skip
    transform_checkpoint_by_rank(**{**given, **other})


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        ({"checkpoint_files_map": []}, TypeError, "checkpoint_files_map: expected a dict, got list"),
        ({"checkpoint_files_map": {"2": "x"}}, TypeError, "checkpoint_files_map: a rank: expected int, got str"),
        ({"checkpoint_files_map": {2: 1}}, TypeError, "checkpoint_files_map: rank 2: expected a path, got int"),
        ({"checkpoint_files_map": {2: "{home}/x.safetensors"}}, ValueError,
         "checkpoint_files_map: rank 2: {home}/x.safetensors: no such file"),
        ({"checkpoint_files_map": {2: "x.ckpt"}}, ValueError,
         "checkpoint_files_map: rank 2: x.ckpt: no such file"),
        ({"checkpoint_files_map": {2: "{home}/a/rank_2/net-1_1.safetensors"}}, ValueError,
         "rank 3 is missing; rank 1 of the destination needs it"),
        ({"checkpoint_files_map": {}}, ValueError, "rank 0, 2, 3 is missing; rank 1 of the destination needs it"),
        ({"save_checkpoint_file_name": 1}, TypeError, "save_checkpoint_file_name: expected str, got int"),
        ({"save_checkpoint_file_name": "a.npz"}, ValueError,
         "save_checkpoint_file_name: a.npz does not end in .safetensors or .ckpt"),
    ],
)  # fmt: skip
def test_by_rank_refuses_what_it_cannot_do(home: Path, other: dict[str, Any], kind: type[Exception], text: str) -> None:
    before = files(home)
    for value in other.values():
        if isinstance(value, dict):
            value |= {key: v.format(home=home) if isinstance(v, str) else v for key, v in value.items()}
    assert refusal(lambda: by_rank(home, **other), kind) == text.format(home=home)
    assert files(home) == before


def test_by_rank_reads_only_the_files_that_it_was_given(home: Path) -> None:
    by_rank(home)
    assert dict(read_full(home / "one.safetensors")) == blobs_of_rank(tp(2), 1, filled(tp(4)))
