"""MindSpore's functions are called as in the examples of their pages, on files that MindSpore has written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from launcher import checkpoint as ms
from launcher.checkpoint import build_searched_strategy
from launcher.extras.mindspore.strategy_file import read_strategy
from launcher.plan.values.layout import Layout
from tests.checkpoint.refusal import refusal
from tests.extras.mindspore.truth import FIXTURES, blobs, rank_files

CASES = FIXTURES / "cases"
REAL = FIXTURES / "real_strategy"
TP8, PP2 = CASES / "c01_tp8_to_tp4", CASES / "s09_pp2tp2dp2_to_tp4"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def brought(case: Path) -> None:
    for side in ("src", "dst"):
        shutil.copy(case / f"{side}_strategy.ckpt", f"{side}_strategy.ckpt")
    shutil.copytree(case / "src", "src_checkpoints")


@pytest.mark.parametrize("case", [TP8, PP2], ids=["ckpt", "safetensors"])
def test_transform_checkpoints_writes_ckpt_files_whatever_it_has_read(case: Path) -> None:
    brought(case)
    ms.transform_checkpoints("./src_checkpoints", "./dst_checkpoints", "checkpoint_", "./src_strategy.ckpt",
                             "./dst_strategy.ckpt")  # fmt: skip
    got, want = rank_files(Path("dst_checkpoints")), rank_files(case / "expected")
    assert {r: p.name for r, p in got.items()} == {r: f"checkpoint_{r}.ckpt" for r in want}
    assert all(blobs(got[r]).items() >= blobs(want[r]).items() for r in want)


def test_transform_checkpoint_by_rank_takes_the_files_of_the_rank_list() -> None:
    brought(TP8)
    want = rank_files(TP8 / "expected")
    for rank_id in range(4):
        rank_list = ms.rank_list_for_transform(rank_id, "./src_strategy.ckpt", "./dst_strategy.ckpt")
        checkpoint_files_map = {}
        for rank in rank_list:
            checkpoint_files_map[rank] = f"./src_checkpoints/rank_{rank}/src{rank}.ckpt"
        save_checkpoint_file_name = f"./new_checkpoint_rank{rank_id}/pangu{rank_id}-100_2.ckpt"
        ms.transform_checkpoint_by_rank(rank_id, checkpoint_files_map, save_checkpoint_file_name,
                                        "./src_strategy.ckpt", "./dst_strategy.ckpt")  # fmt: skip
        assert blobs(Path(save_checkpoint_file_name)).items() >= blobs(want[rank_id]).items()


@pytest.mark.parametrize("merge", [ms.merge_pipeline_strategys, ms.merge_pipeline_strategies])
def test_merge_pipeline_strategys_takes_a_folder_with_the_files_of_all_ranks(merge: object) -> None:
    Path("src_strategy_dir").mkdir()
    for rank, of in enumerate((0, 0, 2, 2)):
        shutil.copy(REAL / f"pp2_strategy_rank{of}.ckpt", f"src_strategy_dir/stra{rank}.ckpt")
    merge("./src_strategy_dir", "./dst_strategy.ckpt")  # type: ignore[operator]
    assert Path("dst_strategy.ckpt").read_bytes() == (REAL / "pp2_merged.ckpt").read_bytes()


def test_load_segmented_checkpoints_gives_parameters_that_a_net_loads() -> None:
    home = rank_files(TP8 / "src")[3].parent
    shutil.copytree(home, "segmented")
    param_dict = ms.load_segmented_checkpoints("./segmented")
    raw = blobs(rank_files(TP8 / "src")[3])
    assert all(isinstance(p, torch.nn.Parameter) for p in param_dict.values())
    assert {n: tuple(p.shape) for n, p in param_dict.items()} == {n: b.shape for n, b in raw.items()}
    net = torch.nn.ParameterDict({n.replace(".", "-"): torch.zeros(p.shape) for n, p in param_dict.items()})
    net.load_state_dict({n.replace(".", "-"): p for n, p in param_dict.items()})


@pytest.mark.parametrize("path", sorted(p for p in REAL.glob("*strategy_rank*")), ids=lambda p: p.name)
def test_build_searched_strategy_reads_the_layout_of_each_parameter(path: Path) -> None:
    shutil.copy(path, f"strategy_train{path.suffix}")
    found = build_searched_strategy(f"./strategy_train{path.suffix}")
    assert all(isinstance(layout, Layout) for layout in found.values())
    file = read_strategy(path)
    assert found.keys() == {n for layouts in file.stages().values() for n in layouts}
    ranks = {s.ranks for s in file.layouts.values()}
    assert {layout.grid.size for layout in found.values()} == {n * (max(file.stages()) + 1) for n in ranks}


def test_files_that_are_no_strategy_file_are_refused() -> None:
    Path("x.ckpt").write_bytes(b"\xff\xff")
    assert refusal(lambda: build_searched_strategy(3), TypeError) == (  # type: ignore[arg-type]
        "strategy_filename: expected a path or None, got int"
    )
    assert refusal(lambda: build_searched_strategy("none.ckpt")) == "strategy_filename: none.ckpt: no such file"
    assert refusal(lambda: build_searched_strategy("x.ckpt")).startswith("x.ckpt: not a MindSpore strategy file")
