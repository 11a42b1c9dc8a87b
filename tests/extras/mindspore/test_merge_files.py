from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import merge_pipeline_strategies, merge_pipeline_strategys
from launcher.checkpoint.layout.strategy_file import dump, load
from launcher.extras.mindspore.strategy_file import read_strategy
from tests.checkpoint.saving import small


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


REAL = Path(__file__).parent / "fixtures" / "real_strategy"


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
    text = f"two forms in one merge: {ours} is the launcher's, {other} is MindSpore's; merge files of one form"
    assert merge_refusal(ValueError, tmp_path, tmp_path / "out.json") == text
    for path in tmp_path.glob("stage*.json"):
        path.unlink()
    shutil.copy(REAL / "json_tp4_strategy_rank0.json", tmp_path / "b.json")
    text = f"two forms in one merge: {other} is protobuf, {tmp_path / 'b.json'} is json; merge files of one form"
    assert merge_refusal(ValueError, tmp_path, tmp_path / "out.json") == text
