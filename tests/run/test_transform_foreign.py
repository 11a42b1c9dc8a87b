"""``transform`` reads what ``import`` reads and writes rank files: real files of other programs, there and back."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from launcher.__main__ import main
from launcher.checkpoint import Blob, open_checkpoint, read_full, verify
from launcher.checkpoint.box_bytes import box_index
from launcher.checkpoint.layout import strategy_file as ours
from launcher.checkpoint.read import read_rank
from launcher.checkpoint.tensorfile.safetensors import words
from tests.checkpoint.saving import blobs_of_rank, filled, write_file
from tests.extras.mindspore.small_net import net
from tests.extras.mindspore.truth import FIXTURES, blobs, rank_files
from tests.run.launching import ROOT

CASES = FIXTURES / "cases"
BOTH_WAYS = [
    "c01_tp8_to_tp4", "c06_dp4tp2_opt2_to_dp2tp4_optfull", "c08_pp2tp2_to_tp2", "c17_shared_param_tp2_to_pp2tp2",
    "c22_pp2tp2_json_merged", "s09_pp2tp2dp2_to_tp4", "s20_safetensors_to_ckpt",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def transform(*words: str, expect: int = 0, **settings: object) -> None:
    typed = [f"steps.transform.{key}={value}" for key, value in settings.items()]
    assert main(["recipe=lm_single", "steps=[transform]", *typed, *words]) == expect


def strategy(folder: Path, side: str) -> Path:
    return next(folder.glob(f"{side}_strategy.*"))


def tensors(folder: Path) -> dict[int, dict[str, Blob]]:
    return {rank: blobs(path) for rank, path in rank_files(folder).items()}


def full_tensors(folder: Path) -> dict[str, Blob]:
    return read_rank(open_checkpoint(folder), ours.load(folder / "strategy"), 0)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_mindspores_rank_folders_become_what_mindspore_makes_of_them(name: str) -> None:
    folder = CASES / name
    suffix = rank_files(folder / "expected")[0].suffix
    transform(src=folder / "src", src_strategy=strategy(folder, "src"), strategy=strategy(folder, "dst"),
              dst="out", format=suffix[1:], prefix="out", workers=2)  # fmt: skip
    want = tensors(folder / "expected")
    got = tensors(Path("out"))
    assert {r: p.name for r, p in rank_files(Path("out")).items()} == {r: f"out{r}{suffix}" for r in want}
    assert all(got[r].items() >= want[r].items() for r in want)


@pytest.mark.parametrize("name", ["c01_tp8_to_tp4", "c08_pp2tp2_to_tp2", "s09_pp2tp2dp2_to_tp4"])
def test_foreign_files_become_a_checkpoint_and_the_same_files_again(name: str) -> None:
    folder = CASES / name
    src, suffix = folder / "src", rank_files(folder / "src")[0].suffix
    transform(src=src, src_strategy=strategy(folder, "src"), dst="ours", nproc=4, shard_size=2, workers=2)
    assert verify(Path("ours")) == []
    full = read_full(folder / "full.safetensors")
    transform(src="ours", dst="single")
    found = full_tensors(Path("single"))
    assert {n: found[n] for n in full} == dict(full)
    assert found.keys() - full.keys() <= {"epoch_num", "global_step", "learning_rate"}
    transform(src="ours", strategy=_with_loose(folder, "ours"), dst="back", format=suffix[1:])
    assert tensors(Path("back")) == tensors(src)


def _with_loose(folder: Path, there: str) -> Path:
    """Write the source's own layouts in the form that lies beside our rank files."""
    transform(src=folder / "src", src_strategy=strategy(folder, "src"), strategy=strategy(folder, "src"), dst="same")
    found = ours.load(Path("same") / "strategy")
    path = Path("same.json")
    path.write_text(ours.text(found, tuple(range(found.stages))))
    return path


def test_the_files_of_one_stage_are_a_part_of_what_they_come_to() -> None:
    folder = CASES / "c24_by_stage_path"
    settings = {"src": folder / "src", "src_strategy": strategy(folder, "src"), "strategy": strategy(folder, "dst")}
    transform(dst="out", format="ckpt", prefix="out", **settings)
    want = rank_files(folder / "expected")
    got = rank_files(Path("out"))
    assert {r: p.name for r, p in got.items()} == {r: p.name for r, p in want.items()}
    assert all("_part" in p.name for p in got.values())
    assert all(blobs(got[r]) == blobs(want[r]) for r in want)


def test_a_part_is_no_whole_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    folder = CASES / "c24_by_stage_path"
    settings = {"src": folder / "src", "src_strategy": strategy(folder, "src"), "strategy": strategy(folder, "dst")}
    transform(dst="out", expect=2, **settings)
    said = capsys.readouterr().err
    assert "the source is only stage " in said
    assert "give format ckpt or safetensors for rank files" in said
    assert not Path("out").exists()


TARGET = net(4, 2)
FULL = filled(TARGET)
BLOBS = {name: Blob.of("float32", entry.layout.shape, FULL[name]) for name, entry in TARGET.entries.items()}


def saved(form: str) -> Path:
    """Save the same tensors as other programs do."""
    if form == "one file":
        write_file(Path("one.safetensors"), BLOBS, {})
        return Path("one.safetensors")
    if form == "Hugging Face":
        Path("hf").mkdir()
        write_file(Path("hf/model.safetensors"), BLOBS, {})
        return Path("hf")
    state = {n: torch.frombuffer(bytearray(b.data), dtype=torch.float32).reshape(b.shape) for n, b in BLOBS.items()}
    state["emb.w"] = state["emb.w"].t().contiguous().t()  # its numbers are not contiguous
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.save(state, checkpoint_id="dcp", no_dist=True)
    return Path("dcp")


@pytest.mark.parametrize("form", ["one file", "Hugging Face", "DCP"])
def test_whole_tensors_become_a_checkpoint_and_rank_files(form: str) -> None:
    src = saved(form)
    transform(src=src, dst="ours", nproc=4, shard_size=4, workers=3)
    assert verify(Path("ours")) == []
    transform(src="ours", dst="single")
    assert full_tensors(Path("single")) == BLOBS
    Path("to.json").write_text(ours.text(TARGET, tuple(range(TARGET.stages))))
    for suffix in ("ckpt", "safetensors"):
        transform(src=src, strategy="to.json", dst=suffix, format=suffix, workers=2)
        assert tensors(Path(suffix)) == {r: blobs_of_rank(TARGET, r, FULL) for r in range(TARGET.grid.size)}
        assert ours.load(Path(suffix) / "strategy.json") == TARGET
        transform(src=suffix, src_strategy=f"{suffix}/strategy.json", dst=f"{suffix}2")
        assert full_tensors(Path(f"{suffix}2")) == BLOBS


def test_dims_that_the_source_cuts_for_operators_are_cut_over_tp() -> None:
    folder = CASES / "c01_tp8_to_tp4"
    settings = {"src": folder / "src", "src_strategy": strategy(folder, "src")}
    transform(dst="out", nproc=2, tp=2, format="safetensors", **settings)
    cut = ours.load(Path("out/strategy.json"))
    assert dict(cut.grid.axes) == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 2}
    full = read_full(folder / "full.safetensors")
    halved = 0
    for rank, path in rank_files(Path("out")).items():
        for name, blob in blobs(path).items():
            if name not in full:
                continue
            box = cut.entries[name].layout.box(rank)
            assert box is not None
            assert np.array_equal(words(blob.data, blob.spec), words(full[name].data, full[name].spec)[box_index(box)])
            halved += blob.spec.nbytes * 2 == full[name].spec.nbytes
    assert halved


REFUSED = {
    "a prefix of a checkpoint": (
        {"src": "hf", "prefix": "net"},
        "steps.transform.prefix = net: begins the names of rank files, which format=launcher does not write; set "
        "steps.transform.format=safetensors or ckpt",
    ),
    "a strategy of the run's own": (
        {"src_strategy": "to.json"}, "src_strategy = to.json: the run's own checkpoint contains its layout",
    ),
    "tp of what nobody has cut": (
        {"src": "hf", "nproc": 2, "tp": 2},
        "steps.transform.tp = 2: the source cuts no tensor over tp, so it does not say which dims to cut; give "
        "steps.transform.strategy, which parallel.param_strategy.save writes",
    ),
    "ranks that tp does not divide": (
        {"src": "hf", "nproc": 3, "tp": 2},
        "steps.transform.nproc = 3: does not divide into 1 stage x 1 shard x 2-way tensor parallelism",
    ),
    "a strategy of whole tensors": (
        {"src": "hf", "src_strategy": "to.json"},
        "steps.transform.src = hf: it has full tensors, which need no strategy; leave strategy out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), list(REFUSED.values()), ids=list(REFUSED))
def test_impossible_transforms_are_refused_before_anything_is_written(
    settings: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("Hugging Face")
    Path("to.json").write_text(ours.text(TARGET, tuple(range(TARGET.stages))))
    transform(dst="out", expect=2, **settings)
    assert said in capsys.readouterr().err
    assert not Path("out").exists()


def test_rank_files_are_no_checkpoint_to_evaluate_or_to_export(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["steps=[train,save,transform,export]", "steps.transform.format=ckpt", "show=plan"]
    assert main(["recipe=lm_single", *words]) == 2
    text = "steps.export: reads the output of steps.transform, but format=ckpt writes rank files, not a checkpoint"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("show", ["show=plan", "show=null"])
def test_tp_that_the_run_itself_does_not_cut_is_refused_before_it_trains(
    show: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["steps=[train,save,transform]", "steps.transform.tp=2", "steps.transform.nproc=2", "run_dir=run", show]
    assert main(["recipe=lm_single", *words]) == 2
    assert "steps.transform.tp = 2: the source cuts no tensor over tp, so" in capsys.readouterr().err
    assert not Path("run").exists()


def test_show_plan_says_what_will_be_written_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    saved("Hugging Face")
    transform("show=plan", src="hf", dst="out", nproc=4, shard_size=2, format="ckpt")
    size = sum(b.spec.nbytes for b in BLOBS.values())
    assert f"hf: {len(BLOBS)} tensors, {size} B -> .ckpt files of 4 ranks" in capsys.readouterr().out
    assert not Path("out").exists()


def test_no_torch_is_needed_for_any_of_it() -> None:
    folder = CASES / "c08_pp2tp2_to_tp2"
    shutil.copytree(folder / "src", "src")
    code = f"""
import sys
from pathlib import Path
from launcher.job.schema.steps import Transform
from launcher.steps import transform
step = Transform(src="src", src_strategy={str(strategy(folder, "src"))!r}, nproc=2, shard_size=2)
transform.rewrite(step, Path("src"), Path("ours"))
files = step.model_copy(update={{"format": "ckpt", "src_strategy": None}})
transform.rewrite(files, Path("ours"), Path("files"))
print(sorted({{"torch"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert (done.stdout, done.stderr) == ("[]\n", "")
