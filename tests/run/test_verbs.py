"""The steps that read or write checkpoints, as a user types them."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher import run_job
from launcher.__main__ import main
from launcher.checkpoint import read_full, read_hf, transform_checkpoints
from launcher.checkpoint.foreign.names import TO_LLAMA, renamed
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.read import open_checkpoint
from launcher.extras.mindspore.ckpt import write_ckpt
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy_file import form_of, read_strategy, write_strategy
from launcher.job.compose import compose
from launcher.job.schema.steps import Evaluate, Export, Transform
from tests.checkpoint.saving import blobs_of_rank
from tests.run import llama
from tests.run.launching import BATCH, TINY, checkpoints, last, losses, run, say, shape, status, tensors


def test_an_export_to_hugging_face_has_their_names_and_the_files_beside_it(trained: Path) -> None:
    folder = trained / "exports" / "hf"
    names = set(read_hf(folder))
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"} <= names
    assert not any(n.startswith(("embed", "layers", "lm_head")) for n in names)  # tied: the head is the table
    assert len([*folder.glob("model-*.safetensors")]) > 1
    assert (folder / "config.json").read_text() == '{"model_type": "llama"}\n'
    assert status(trained)["metrics"]["export_gap"] < 1e-5


@pytest.mark.parametrize("layout", [{"pp": 2, "shard": 2}, {}], ids=["four ranks", "one rank"])
def test_an_exported_hugging_face_folder_is_imported_with_the_same_loss(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: dict[str, int]
) -> None:
    folder = run(
        tmp_path / "run", "steps=[import,evaluate,export]", f"steps.import.src={trained}/exports/hf", BATCH,
        "steps.import.names=llama", *shape(**layout), steps=2,
    )  # fmt: skip
    found, before = status(folder)["metrics"], status(trained)["metrics"]
    assert found["val_loss"] == before["val_loss"] if layout else abs(found["val_loss"] - before["val_loss"]) < 1e-6
    assert found["export_gap"] < 1e-5
    mine, theirs = read_full(folder / "exports" / "model.safetensors"), read_hf(trained / "exports" / "hf")
    assert bytes(mine["embed.weight"].data) == bytes(theirs["model.embed_tokens.weight"].data)
    assert f"import: {trained}/exports/hf -> step-000000, " in capfd.readouterr().out


def test_a_folder_of_torch_dcp_comes_in_too(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.checkpoint as dcp

    there = read_hf(trained / "exports" / "hf")
    state = {n: torch.frombuffer(bytearray(b.data), dtype=torch.float32).reshape(b.shape) for n, b in there.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.save({**state, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    words = ["steps=[import,evaluate]", f"steps.import.src={tmp_path}/dcp", "steps.import.names=llama", BATCH]
    folder = run(tmp_path / "run", *words)
    assert status(folder)["metrics"]["val_loss"] == status(trained)["metrics"]["val_loss"]
    assert "import: left out, because they are not tensors: step\n" in capfd.readouterr().out


def test_rank_folders_of_mindspore_come_in_with_their_strategy(trained: Path, tmp_path: Path) -> None:
    merged = tmp_path / "strategy.ckpt"
    strategy = open_checkpoint(last(trained)).strategy
    write_strategy(merged, merged_file(strategy.only("param")), "protobuf")
    transform_checkpoints(last(trained), tmp_path / "full", "full", output_format="safetensors")
    one = read_full(tmp_path / "full" / "rank_0" / "full0.safetensors")
    plain = {n: one[n] for n in strategy.only("param").entries}
    for rank in range(4):
        (tmp_path / "ranks" / f"rank_{rank}").mkdir(parents=True)
        pieces = blobs_of_rank(strategy.only("param"), rank, {n: bytes(b.data) for n, b in plain.items()})
        specs = {n: b.spec for n, b in pieces.items()}
        write_ckpt(tmp_path / "ranks" / f"rank_{rank}" / "net-1_1.ckpt", specs, lambda n, of=pieces: [of[n].data])
    words = [f"steps.import.src={tmp_path}/ranks", f"steps.import.strategy={merged}", BATCH]
    folder = run(tmp_path / "run", "steps=[import,evaluate]", *words)
    assert status(folder)["metrics"]["val_loss"] == status(trained)["metrics"]["val_loss"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_width_are_cast_to_what_the_run_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    ours = llama.write(tmp_path / "hf", dtype)
    words = ["recipe=smollm2_pp2_tp2", *llama.overrides(tmp_path / "hf"), "data.seq_len=16", "steps.export.check=false"]
    assert main([*words, "steps=[import,export]", f"run_dir={tmp_path}/run"]) == 0
    kept = "all values kept" if dtype == torch.bfloat16 else "each value rounded to the nearest"
    said = f"import: 20 tensors cast from {str(dtype).removeprefix('torch.')} to float32, {kept}\n"
    assert said in capsys.readouterr().out
    new = renamed(ours, TO_LLAMA).names
    out = load_file(tmp_path / "run/exports/hf/model.safetensors")
    assert out.keys() == {*new.values()}
    assert all(torch.equal(out[new[name]], t.float()) for name, t in ours.items())


def test_weights_under_names_of_another_program_are_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama.write(tmp_path / "hf")
    words = ["recipe=smollm2_pp2_tp2", *llama.overrides(tmp_path / "hf"), "data.seq_len=16", "steps=[import]"]
    assert main([*words, "steps.import.names=null", f"run_dir={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert f"steps.import.names: {tmp_path}/hf: the model has no place for model.embed_tokens.weight, " in said
    assert "; these are Llama names as transformers writes them\n" in said
    assert said.endswith("    try:    steps.import.names=llama\n")
    assert not (tmp_path / "run").exists()


def test_training_goes_on_from_what_was_imported(trained: Path, tmp_path: Path) -> None:
    words = ["steps=[import,train,save]", f"steps.import.src={trained}/exports/hf", "steps.import.names=llama"]
    first = run(tmp_path / "a", *words, steps=2)
    assert checkpoints(first) == ["step-000000", "step-000002"]
    assert losses(first)[0] < losses(trained)[0]
    again = shutil.copytree(first, tmp_path / "b")
    say(again, status="running", steps=[], metrics={})
    run(again, *words, steps=2)
    assert tensors(again, 2) == tensors(first, 2)


def test_a_killed_run_goes_on_from_its_own_checkpoint_not_from_the_import(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["steps=[import,train,save]", f"steps.import.src={trained}/exports/hf", "steps.import.names=llama",
             "schedule=constant"]  # fmt: skip
    run(folder, *words, steps=2)
    run(folder, *words, steps=4)
    assert "import: skipped, because the run already has step-000002" in capfd.readouterr().out
    assert tensors(run(tmp_path / "straight", *words, steps=4), 4) == tensors(folder, 4)


def test_verify_says_in_one_line_that_all_is_well(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, f"run_dir={trained.parent}/look", "steps=[verify]", f"steps.verify.src={last(trained)}"]) == 0
    line = r"verify: \S+/step-000002: \d+ tensors, [\d.]+ KB, in \d+ files: complete, all digests match"
    assert re.search(line, capfd.readouterr().out)


def test_verify_ends_with_one_and_names_file_and_tensor(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(last(trained), tmp_path / "step-000002"))
    file = folder / "rank_0" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert main([*TINY, f"run_dir={tmp_path}/run", "steps=[verify]", f"steps.verify.src={folder}"]) == 1
    text = rf"error: verify: {file}: tensor \S+ is damaged: its digest is \w+, the manifest says \w+\n"
    assert re.fullmatch(text, capfd.readouterr().err)


def test_inspect_prints_who_holds_what(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, f"run_dir={tmp_path}/run", "steps=[inspect]", f"steps.inspect.src={last(trained)}"]) == 0
    out = capfd.readouterr().out
    assert f"inspect: {last(trained)}: " in out
    assert "tensor  " in out
    assert re.search(r"embed\.weight = head\.weight +64x16 +float32 +param +dp_shard \| - +0-1 +0-3 +4096", out)


def test_a_plan_of_a_transform_says_who_reads_which_bytes_and_writes_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["steps=[transform]", f"steps.transform.src={last(trained)}", "steps.transform.nproc=2",
             "steps.transform.shard_size=2", "show=plan"]  # fmt: skip
    assert main([*TINY, f"run_dir={tmp_path}/run", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{last(trained)}: 4 ranks -> 2 ranks, ")
    assert re.search(r"KB to read and to write, at most 40.0 MB in memory at once\n", out)
    assert re.search(r"rank +reads +tensors +bytes\n +0 +rank_0/model.safetensors +\d+ +\d+\n", out)
    assert re.search(
        r"rank +reads +tensor +from byte +to +bytes\n +0 +rank_0/model.safetensors +embed.weight +\d+", out
    )
    assert not (tmp_path / "run").exists()


def test_a_transform_takes_its_layout_from_a_strategy_file(trained: Path, tmp_path: Path) -> None:
    other = run(tmp_path / "other", *shape(pp=1, shard=2), "steps=[save]", steps=1)
    words = [f"steps.transform.src={last(trained)}", f"steps.transform.dst={tmp_path}/out"]
    run(tmp_path / "run", "steps=[transform]", *words, f"steps.transform.strategy={other}/strategy")
    found = open_checkpoint(tmp_path / "out").strategy
    assert found.only("param", "buffer") == open_checkpoint(last(other)).strategy.only("param", "buffer")
    layout = found.entries["embed.weight"].layout
    assert found.entries["optim.exp_avg.embed.weight"].layout == layout
    assert found.entries["optim.step.embed.weight"].layout.split == ()


@pytest.mark.parametrize(("form", "name"), [("same", "merged.json"), ("ours", "merged.json"), ("json", "merged.json"),
                                            ("protobuf", "merged.ckpt")])  # fmt: skip
def test_strategies_are_merged_in_the_form_asked_for(trained: Path, tmp_path: Path, form: str, name: str) -> None:
    words = [f"steps.merge_strategies.src={last(trained)}/strategy", f"steps.merge_strategies.form={form}"]
    folder = run(tmp_path / "run", "steps=[merge_strategies]", *words)
    merged = folder / "strategy" / name
    if form in ("same", "ours"):
        assert strategy_file.load(merged) == open_checkpoint(last(trained)).strategy
    else:
        assert form_of(merged.read_bytes()) == form
        assert "embed.weight" in read_strategy(merged).stages()[1]


def test_two_transforms_and_two_exports_each_write_a_place_of_their_own(tmp_path: Path) -> None:
    """The second transform and export used to overwrite the output of the first, even with their own path.

    A step that reads such an output reads the last one that was written before it.
    """
    asked = compose([*TINY, f"run_dir={tmp_path}/run", "train.steps=1", *shape(pp=2, shard=2)]).job
    steps = {
        "transform": Transform(nproc=1), "named": Transform(nproc=2, shard_size=2, dst=f"{tmp_path}/named"),
        "export": Export(check=False), "again": Transform(nproc=1), "looked": Evaluate(of="transformed", batches=1),
        "out": Export(check=False), "other": Export(check=False, path=f"{tmp_path}/other.safetensors"),
    }  # fmt: skip
    run_job(asked.model_copy(update={"steps": asked.steps | steps}))
    ranks = {place: open_checkpoint(place).strategy.grid.size for place in (
        tmp_path / "run/transformed", tmp_path / "named", tmp_path / "run/transformed-again",
    )}  # fmt: skip
    assert list(ranks.values()) == [1, 2, 1]
    first = (tmp_path / "run/exports/model.safetensors").read_bytes()
    assert (tmp_path / "run/exports/model-out.safetensors").read_bytes() == first
    assert (tmp_path / "other.safetensors").read_bytes() == first


def test_an_export_with_nothing_to_compare_with_tries_one_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", "steps=[train,save,export]", steps=1)
    assert "of one batch in one process (not compared: no 'evaluate' used these weights)\n" in capsys.readouterr().out


def test_an_export_of_an_earlier_checkpoint_is_not_compared_with_the_loss_of_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "run/checkpoints/step-000001"
    words = (
        *shape(pp=1, shard=1),
        "steps=[train,evaluate,save,export]",
        "checkpoint.every=1",
        f"steps.export.src={earlier}",
    )
    run(tmp_path / "run", *words, steps=2)
    assert "of one batch in one process (not compared: no 'evaluate' used these weights)\n" in capsys.readouterr().out
    pieces = load_file(earlier / "rank_0/model.safetensors")
    exported = load_file(tmp_path / "run/exports/model.safetensors")
    assert exported
    assert all(torch.equal(exported[name], pieces[name]) for name in exported)
