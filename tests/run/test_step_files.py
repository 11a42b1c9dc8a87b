"""Problems with the files of a step are reported before anything starts."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.plan.values.tensor_spec import TensorSpec
from tests.run.launching import BATCH, TINY, checkpoints, last, run, shape, status


def table(home: Path, *rows: str) -> None:
    """Write a user's own recipe with a table of names."""
    (home / "recipes").mkdir(parents=True)
    lines = "".join(f"      {row}\n" for row in rows)
    head = "defaults: [override /model: lm_tiny, override /data: random_tokens, override /steps: [import, evaluate]]\n"
    (home / "recipes" / "table.yaml").write_text(f"{head}steps:\n  import:\n    names:\n{lines}")


def test_a_table_of_names_is_yaml(trained: Path, tmp_path: Path) -> None:
    table(
        tmp_path / "mine",
        "model.embed_tokens: embed",
        r"'^model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)': layers.\1.attn.\2.\3",
        r"'^model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.+)': layers.\1.mlp.\2.\3",
        r"'^model\.layers\.(\d+)\.input_layernorm\.(.+)': layers.\1.attn_norm.\2",
        r"'^model\.layers\.(\d+)\.post_attention_layernorm\.(.+)': layers.\1.mlp_norm.\2",
        "model.norm: norm",
    )
    words = [f"--config-dir={tmp_path}/mine", "recipe=table", "steps=[import,evaluate]", BATCH, *shape(pp=2, shard=2)]
    folder = run(tmp_path / "run", *words, f"steps.import.src={trained}/exports/hf")
    assert status(folder)["metrics"]["val_loss"] == pytest.approx(status(trained)["metrics"]["val_loss"], abs=1e-6)


@pytest.mark.parametrize("show", ["null", "plan"])
def test_a_wrong_table_is_refused_whole_before_anything_is_started(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], show: str
) -> None:
    table(
        tmp_path / "mine",
        "model.embed_tokens: embed",
        r"'^model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)': layers.\1.attn.\2.\3",
        r"'^model\.layers\.(\d+)\.mlp\.(gate|up)_proj\.(.+)': layers.\1.mlp.up.\3",
        r"'^model\.layers\.(\d+)\.input_layernorm\.(.+)': layers.\1.attn_norm.\2",
        r"'^model\.layers\.(\d+)\.post_attention_norm\.(.+)': layers.\1.mlp_norm.\2",
        "model.norm: normal",
    )
    words = [f"--config-dir={tmp_path}/mine", *TINY[:-1], "recipe=table", "train.steps=1", f"show={show}"]
    source = trained / "exports" / "hf"
    assert main([*words, f"steps.import.src={source}", f"run_dir={tmp_path}/run"]) == 2
    said = capsys.readouterr()
    gate, row = "model.layers.{0}.mlp.gate_proj.weight", "recipes/table.yaml"
    assert [*re.findall(r"^  (steps\S+?): (.+)\n    set in: \S*?(recipes\S+)", said.err, re.MULTILINE)] == [
        (
            r"steps.import.names.^model\.layers\.(\d+)\.mlp\.(gate|up)_proj\.(.+)",
            f"{gate.format(k)} and {gate.format(k).replace('gate', 'up')} would both become layers.{k}.mlp.up.weight; "
            "set one to null to leave it out",
            f"{row}:7:7",
        )
        for k in range(2)
    ] + [
        (
            "steps.import.names",
            "no row of the table matches model.layers.0.post_attention_layernorm.weight, model.layers.0.mlp.down_proj."
            "weight, model.layers.1.post_attention_layernorm.weight, model.layers.1.mlp.down_proj.weight "
            f"of {source}; add rows, with null to leave a tensor out",
            f"{row}:4:5",
        ),
        (
            "steps.import.names.model.norm",
            f"{source}: the model has no place for normal.weight; set this row to null to leave them out",
            f"{row}:10:7",
        ),
        (
            "steps.import.names",
            f"{source}: it has no tensor for the model's layers.0.mlp_norm.weight, layers.0.mlp.gate.weight, "
            "layers.0.mlp.down.weight, layers.1.mlp_norm.weight, layers.1.mlp.gate.weight, layers.1.mlp.down.weight "
            "and 1 more; these are Llama names as transformers writes them",
            f"{row}:4:5",
        ),
        (
            r"steps.import.names.^model\.layers\.(\d+)\.post_attention_norm\.(.+)",
            f"this row matches no tensor of {source}",
            f"{row}:9:7",
        ),
    ]
    assert said.out == ""
    assert not (tmp_path / "run").exists()


def test_a_plan_is_shown_without_the_weights_that_it_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "steps=[import]", "steps.import.src=weights/none", "show=plan"]) == 0
    told = "steps.import.src: weights/none is not on this machine; it is checked when the run starts\n"
    assert capsys.readouterr().out.endswith(f"\n{told}")


TRANSFORM = ["steps=[transform]", "steps.transform.src=last"]
MERGE = ["steps=[merge_strategies]", "steps.merge_strategies.src=half"]
AT_THE_DOOR = {
    "a strategy of another model": (
        [*TRANSFORM, "steps.transform.strategy=one.json"],
        "steps.transform.strategy = one.json: the strategies do not match:",
    ),
    "a strategy that is no JSON": (
        ["steps=[train,save,transform]", "steps.transform.strategy=bad.json"],
        "steps.transform.strategy = bad.json: not a MindSpore strategy file (json): not JSON",
    ),
    "stages that cannot be made": (
        [*TRANSFORM, "steps.transform.stages=3", "steps.transform.nproc=6"],
        "steps.transform.stages = 3: cannot be made from 2 stages; stages are merged, not cut",
    ),
    "a target that is not empty": (
        ["steps=[train,save,transform]", "steps.transform.dst=half"],
        "steps.transform.dst = half: the destination is not empty; give another, or set overwrite: true",
    ),
    "a target that is no checkpoint": (
        [*TRANSFORM, "steps.transform.dst=half", "steps.transform.overwrite=true"],
        "steps.transform.dst = half: the destination is not empty and not a checkpoint, so it is never overwritten",
    ),
    "a target in its source": (
        [*TRANSFORM, "steps.transform.dst=last/new"],
        "steps.transform.dst = last/new: the destination and the source last are the same folder, "
        "or one is in the other",
    ),
    "a target below a file": (
        ["steps=[train,save,transform]", "steps.transform.dst=bad.json/new"],
        "steps.transform.dst: the folder of this output cannot be made at bad.json: bad.json is not a folder",
    ),
    "a head that is not that of the manifest": (
        ["steps=[transform]", "steps.transform.src=cut"],
        "steps.transform.src: cut/rank_1/model.safetensors: a file of another rank or layout: it says format tp, not "
        "pt",
    ),
    "names of an export that the run does not have": (
        ["--config-dir=.", "recipe=export", "steps=[train,save,export]", "steps.export.format=hf"],
        "steps.export.names: no row of the table matches embed.weight, ",
    ),
    "names of an export that its source does not have": (
        ["--config-dir=.", "recipe=export", "steps=[export]", "steps.export.format=hf", "steps.export.src=last"],
        "steps.export.names: no row of the table matches embed.weight, ",
    ),
    "an export that is a folder": (
        ["steps=[train,save,export]", "steps.export.path=half"],
        "steps.export.path = half: a folder, but the export is one file; give a file name in it",
    ),
    "a truncated source": (
        ["steps=[import]", "steps.import.src=short.safetensors"],
        "steps.import.src = short.safetensors: truncated: its tensors end at byte ",
    ),
    "pieces without a strategy": (
        ["steps=[import]", "steps.import.src=ranks"],
        "steps.import.src = ranks: no strategy file: then all ranks must have the same full checkpoint, but w of rank "
        "1 differs from rank 0; give the strategy file that they were saved with, or ",
    ),
    "whole tensors with a strategy": (
        ["steps=[import]", "steps.import.src=hf", "steps.import.strategy=one.json"],
        "steps.import.src = hf: it has full tensors, which need no strategy; leave strategy out",
    ),
    "a checkpoint to verify without its manifest": (
        ["steps=[verify]", "steps.verify.src=half"],
        "steps.verify.src = half: incomplete checkpoint: it has no manifest.json, which is written last",
    ),
    "a stage that is missing": (
        MERGE,
        "steps.merge_strategies.src: half/stage1.json: stage 0 of 2 is missing; "
        "put the strategy file of every stage into one folder",
    ),
    "strategies merged onto themselves": (
        [
            "steps=[merge_strategies]",
            "steps.merge_strategies.src=cut/strategy",
            "steps.merge_strategies.dst=cut/strategy/stage0.json",
        ],
        "steps.merge_strategies.dst = cut/strategy/stage0.json: the destination is inside the checkpoint ",
    ),
    "an export over its source": (
        ["steps=[export]", "steps.export.src=last", "steps.export.path=last/rank_0/model.safetensors"],
        "steps.export.path = last/rank_0/model.safetensors: the destination is inside the checkpoint ",
    ),
    "a head with a flipped bit": (
        ["steps=[transform]", "steps.transform.src=flipped"],
        "steps.transform.src: flipped/rank_1/model.safetensors: its header is not the one that the manifest describes",
    ),
    "pickles": (
        ["steps=[import]", "steps.import.src=pickled"],
        "steps.import.src = pickled: it has only pickles, which are never loaded (pytorch_model.bin); save safetensors",
    ),
    "a name that a terminal would obey": (
        ["steps=[import]", "steps.import.src=red.safetensors"],
        "steps.import.names: red.safetensors: the model has no place for a\\x1b[31m\\nb; map them with names, a table ",
    ),
    "a rank whose file is a pipe": (
        ["steps=[import]", "steps.import.src=piped"],
        "steps.import.src: piped/rank_0: no .safetensors or .ckpt file in it",
    ),
    "a folder without strategies": (
        ["steps=[merge_strategies]", "steps.merge_strategies.src=pickled"],
        "steps.merge_strategies.src: pickled has no strategy files (.json or .ckpt)",
    ),
    "a name that is not of the form": (
        [*MERGE, "steps.merge_strategies.form=json", "steps.merge_strategies.dst=out.ckpt"],
        "steps.merge_strategies.dst = out.ckpt: the name of a file of form json must end in .json\n"
        "steps.merge_strategies.src: half/stage1.json: stage 0 of 2 is missing; put the strategy file of every stage "
        "into one folder",
    ),
}


@pytest.mark.parametrize("case", AT_THE_DOOR)
def test_problems_in_headers_and_manifests_are_reported_before_anything_starts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("last").symlink_to(last(trained))
    Path("hf").symlink_to(trained / "exports/hf")
    grid, norm = (strategy := open_checkpoint(Path("last")).strategy).grid, strategy.entries["norm.weight"]
    Path("one.json").write_text(strategy_file.text(type(strategy)(grid, {"another": norm}), (0, 1)))
    Path("bad.json").write_text("{")
    Path("half").mkdir()
    shutil.copy("last/strategy/stage1.json", "half")
    file = Path(shutil.copytree("last", "cut")) / "rank_1/model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"pt"', b'"tp"'))
    file = Path(shutil.copytree("last", "flipped")) / "rank_1/model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"launcher.rank", b"launcher.rbnk"))
    Path("pickled").mkdir()
    Path("piped/rank_0").mkdir(parents=True)
    os.mkfifo("piped/rank_0/w.safetensors")
    Path("pickled/pytorch_model.bin").touch()
    write_stream(Path("red.safetensors"), {"a\x1b[31m\nb": TensorSpec((), "int8")}, lambda n: [memoryview(b"1")], {})
    shard = next(Path("hf").glob("*.safetensors"))
    Path("short.safetensors").write_bytes(shard.read_bytes()[:-4])
    for rank in range(2):
        Path(f"ranks/rank_{rank}").mkdir(parents=True)
        piece = bytes([rank, 0, 0, 0])
        file = Path(f"ranks/rank_{rank}/net.safetensors")
        write_stream(file, {"w": TensorSpec((1,), "float32")}, lambda n, of=piece: [memoryview(of)], {})
    Path("recipes").mkdir()
    head = "defaults: [override /steps: [train, save, export]]\nsteps: {export: {names: {emb: x}}}\n"
    Path("recipes/export.yaml").write_text(head)
    words, text = AT_THE_DOOR[case]
    before = sorted(Path().rglob("*"))
    assert main([*words[:-1], *TINY[:-1], *words[-1:], "train.steps=2", "runs=runs"]) == 2
    said = capsys.readouterr()
    problems = [line for line in said.err.splitlines()[2:] if re.match(r"  steps", line)]
    texts = [f"  {line}" for line in text.split("\n")]
    assert [line[: len(start)] for line, start in zip(problems, texts, strict=False)] == texts
    assert len(problems) == len(texts) or "terminal" in case
    assert said.out == ""
    assert sorted(Path().rglob("*")) == before


def test_a_source_that_a_step_before_makes_is_seen_by_the_step_in_the_same_words(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.safetensors"
    export = [f"steps.export.src={last(trained)}", f"steps.export.path={made}", "steps.export.check=false"]
    words = [f"steps.import.src={made}", "steps.import.names=llama", f"run_dir={tmp_path}/run", "train.steps=1"]
    assert main([*TINY, "steps=[export,import]", *export, *words]) == 1
    late = capfd.readouterr().err.removeprefix("error: import: ").replace(" (try: steps.import.names=null)", "")
    assert main([*TINY, "steps=[import]", *words]) == 2
    early = [line[2:] for line in capfd.readouterr().err.splitlines() if line.startswith("  steps.import.names: ")]
    assert late.splitlines() == early
    assert not checkpoints(tmp_path / "run")


def test_a_second_start_does_not_ask_for_what_is_done(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    src = shutil.copytree(last(trained), tmp_path / "src")
    words = ["steps=[transform]", f"steps.transform.src={src}", f"steps.transform.dst={tmp_path}/out"]
    folder = run(tmp_path / "run", *words)
    shutil.rmtree(src)
    assert run(tmp_path / "run", *words) == folder
    assert capfd.readouterr().out.endswith(f"already done: {folder}\n")
    (folder / "status.json").write_text("{")
    assert main([*TINY, f"run_dir={folder}", "train.steps=4", *words]) == 2
    text = f"run_dir: {folder}/status.json: damaged: it does not say which steps are done; remove the file to run "
    assert f"  {text}all of them again\n" in capfd.readouterr().err


REFUSED = {
    "a source that is not there": (
        ["steps=[import]", "steps.import.src=nowhere"],
        "steps.import.src = nowhere: no such file or folder",
    ),
    "a source that is nothing of that kind": (
        ["steps=[import]", "steps.import.src=empty"],
        "steps.import.src = empty: not a Hugging Face folder (model.safetensors or model.safetensors.index.json), "
        "a torch DCP folder (.metadata) or rank_<k> folders",
    ),
    "a table with a bad pattern": (
        ["--config-dir=mine", "recipe=table", "steps=[import]", "steps.import.src=file.safetensors"],
        "steps.import.names: ^( is not a regular expression: missing ), unterminated subpattern at position 1\n"
        "steps.import.src = file.safetensors: truncated: a safetensors file has at least 8 bytes, this one 0",
    ),
    "names that are no table": (
        ["steps=[import]", "steps.import.src=file.safetensors", "steps.import.names=lama"],
        "steps.import.names = lama: should be llama or a group of keys, did you mean 'llama'?\n"
        "steps.import.src = file.safetensors: truncated: a safetensors file has at least 8 bytes, this one 0",
    ),
    "a size that is none": (
        ["steps=[train,save,export]", "steps.export.max_shard_size=much"],
        "steps.export.max_shard_size: 'much' is not a size; give bytes, or text such as 2GiB",
    ),
    "a checkpoint that is not there": (
        ["steps=[transform]", "steps.transform.src=nowhere"],
        "steps.transform.src = nowhere: no checkpoint: no such folder",
    ),
    "a checkpoint to verify that is not there": (
        ["steps=[verify]", "steps.verify.src=nowhere"],
        "steps.verify.src = nowhere: no checkpoint: no such folder",
    ),
    "a strategy file that is not there": (
        ["steps=[transform]", "steps.transform.src=nowhere", "steps.transform.strategy=none.json"],
        "steps.transform.src = nowhere: no checkpoint: no such folder\n"
        "steps.transform.strategy = none.json: no such file",
    ),
    "a file to go along that is not there": (
        ["steps=[save,export]", "steps.export.format=hf", "steps.export.beside=[config.json]"],
        "steps.export.beside: config.json: cannot be copied into the model's folder: no such file",
    ),
    "weights from two places": (
        ["steps=[import,train]", "steps.import.src=file.safetensors", "checkpoint.resume=elsewhere"],
        "checkpoint.resume = elsewhere: cannot resume from this checkpoint: elsewhere: no checkpoint: no such folder\n"
        "checkpoint.resume = elsewhere: the step 'import' loads the weights from elsewhere\n"
        "steps.import.src = file.safetensors: truncated: a safetensors file has at least 8 bytes, this one 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    words, text = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    table(tmp_path / "mine", "'^(': a")
    (tmp_path / "file.safetensors").write_bytes(b"")
    assert main([*TINY, "train.steps=2", "runs=runs", *words]) == 2
    problems = [line for line in capsys.readouterr().err.splitlines()[2:] if re.match(r"  \S", line)]
    assert problems == [f"  {line}" for line in text.splitlines()]
    assert not (tmp_path / "runs").exists()
