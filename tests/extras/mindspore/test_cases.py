from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.checkpoint import Strategy, read_full
from launcher.extras.mindspore.from_ours import stage_files
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy_file import parse, read_strategy, strategy_text
from launcher.extras.mindspore.to_ours import full_specs, to_strategy
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.mindspore.truth import CASES, FIXTURES, Array, array, blobs, case, index, rank_files

WRONG = {"c16_bug_opt_shard_ascending_map"}  # MindSpore wrote wrong values
LOST = {
    "s17_shared_param_tp2_to_pp2tp2": {(0, "embed.weight"), (1, "embed.weight")}
}  # by rank, the tensors that it left out

BY_STAGE = FIXTURES / "cases" / "c24_by_stage_path"
WHOLE = [folder for folder in CASES if folder != BY_STAGE]  # the cases with the full tensors


def side(folder: Path, which: str) -> Path | None:
    return next(iter(folder.glob(f"{which}_strategy.*")), None)


def check(folder: Path, strategy: Strategy, files: dict[int, Path], lost: set[tuple[int, str]]) -> None:
    full = read_full(folder / "full.safetensors")
    assert strategy.grid.size == len(files)
    for rank, path in files.items():
        found = blobs(path)
        held = strategy.entries_of(rank)
        assert held.keys() - found.keys() == {name for at, name in lost if at == rank}
        for name in held.keys() & found.keys():
            box = held[name].layout.box(rank)
            assert box is not None
            want = array(full[name])[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]
            np.testing.assert_array_equal(array(found[name]), want, err_msg=f"{path} {name}")


def slices(folder: Path) -> dict[str, TensorSpec]:
    return {name: blob.spec for path in rank_files(folder).values() for name, blob in blobs(path).items()}


@pytest.mark.parametrize("folder", [c for c in WHOLE if side(c, "src")], ids=lambda c: c.name)
def test_each_source_file_holds_what_the_converted_strategy_says(folder: Path) -> None:
    path = side(folder, "src")
    assert path is not None
    file = read_strategy(path)
    specs = full_specs(file, slices(folder / "src"))
    full = read_full(folder / "full.safetensors")
    assert specs == {name: full[name].spec for name in specs}
    check(folder, to_strategy(file, specs), rank_files(folder / "src"), set())


@pytest.mark.parametrize("folder", [c for c in WHOLE if side(c, "dst")], ids=lambda c: c.name)
def test_each_file_that_mindspore_made_is_the_box_of_the_converted_strategy(folder: Path) -> None:
    path = side(folder, "dst")
    assert path is not None
    full = read_full(folder / "full.safetensors")
    strategy = to_strategy(read_strategy(path), {name: blob.spec for name, blob in full.items()})
    lost = LOST.get(folder.name, set())
    if folder.name in WRONG:
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            check(folder, strategy, rank_files(folder / "expected"), lost)
    else:
        check(folder, strategy, rank_files(folder / "expected"), lost)


@pytest.mark.parametrize("folder", WHOLE, ids=lambda c: c.name)
@pytest.mark.parametrize("which", ["src", "dst"])
def test_unlisted_tensors_are_full_and_equal_on_every_rank(folder: Path, which: str) -> None:
    path = side(folder, which)
    listed = set() if path is None else {n for layouts in read_strategy(path).stages().values() for n in layouts}
    first = blobs(rank_files(folder / "src")[0])
    whole = first | dict(read_full(folder / "full.safetensors"))
    for file in rank_files(folder / ("src" if which == "src" else "expected")).values():
        for name, blob in blobs(file).items():
            if name not in listed:
                assert (blob.spec, bytes(blob.data)) == (whole[name].spec, bytes(whole[name].data)), name


@pytest.mark.parametrize("folder", WHOLE, ids=lambda c: c.name)
@pytest.mark.parametrize("which", ["src", "dst"])
def test_a_strategy_written_in_mindspores_form_keeps_every_box(folder: Path, which: str) -> None:
    path = side(folder, which)
    if path is None:
        assert case(folder)[f"{which}_stages"] == 1
        return
    full = {name: blob.spec for name, blob in read_full(folder / "full.safetensors").items()}
    strategy = to_strategy(read_strategy(path), full)
    again = to_strategy(parse(strategy_text(merged_file(strategy), "protobuf"), "again"), full)
    assert {n: [e.layout.box(r) for r in range(strategy.grid.size)] for n, e in strategy.entries.items()} == {
        n: [e.layout.box(r) for r in range(again.grid.size)] for n, e in again.entries.items()
    }
    assert len(stage_files(strategy)) == strategy.stages


def test_the_strategy_of_a_later_stage_alone_means_the_ranks_of_that_stage() -> None:
    file = read_strategy(BY_STAGE / "src_strategy.ckpt")
    assert not file.merged
    assert file.stage == 1
    files = rank_files(BY_STAGE / "src")
    held = {name: blob.spec for name, blob in blobs(files[2]).items()}
    strategy = to_strategy(file, full_specs(file, held))
    assert strategy.grid.axes == (("pp", 2), ("d0", 2))
    whole: dict[str, Array] = {}
    for rank in (2, 3):
        assert strategy.entries_of(rank).keys() == blobs(files[rank]).keys()
        for name, blob in blobs(files[rank]).items():
            entry = strategy.entries[name]
            whole.setdefault(name, np.zeros(entry.layout.shape, array(blob).dtype))
            layout: dict[str, Any] = {
                "dev_matrix": [2],
                "tensor_map": [d[0] if d else -1 for d in file.layouts[name].dims],
            }
            layout |= {"opt_weight_shard_size": 0, "opt_weight_shard_step": 0}
            whole[name][index(layout, entry.layout.shape, rank - 2)] = array(blob)
    target = read_strategy(BY_STAGE / "dst_strategy.ckpt")
    target = replace(target, layouts={n: s for n, s in target.layouts.items() if n in strategy.entries})
    wanted = to_strategy(target, {n: e.spec for n, e in strategy.entries.items()})
    for rank, path in rank_files(BY_STAGE / "expected").items():
        assert blobs(path).keys() == whole.keys()
        for name, blob in blobs(path).items():
            box = wanted.entries[name].layout.box(rank)
            assert box is not None
            cut = whole[name][tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]
            np.testing.assert_array_equal(array(blob), cut)
