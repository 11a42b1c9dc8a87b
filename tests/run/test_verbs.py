"""The steps on checkpoints, as a user types them."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.__main__ import main
from launcher.checkpoint import read_full, read_hf, strategy_file, transform_checkpoints
from launcher.checkpoint.files import write_stream
from launcher.checkpoint.mindspore import form_of, merged_file, read_strategy, write_ckpt, write_strategy
from launcher.checkpoint.names import renamed
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.tables import TO_LLAMA
from launcher.plan.facts import TensorSpec
from tests.checkpoint.saving import held
from tests.run import llama
from tests.run.launching import TINY, checkpoints, losses, run, shape, status, tensors

BATCH = "steps.evaluate.batches=1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on four ranks, evaluated, saved and exported to a Hugging Face folder of several shards."""
    home = tmp_path_factory.mktemp("trained")
    (home / "config.json").write_text('{"model_type": "llama"}\n')
    return run(
        home / "run", "steps=[train,evaluate,save,export]", BATCH, "steps.export.format=hf", "steps.export.names=llama",
        "steps.export.max_shard_size=4KB", f"steps.export.beside=[{home / 'config.json'}]", steps=2,
    )  # fmt: skip


def last(folder: Path) -> Path:
    return folder / "checkpoints" / checkpoints(folder)[-1]


def test_an_export_to_hugging_face_has_their_names_and_the_files_beside_it(trained: Path) -> None:
    folder = trained / "exports" / "hf"
    names = set(read_hf(folder))
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"} <= names
    assert not any(n.startswith(("embed", "layers", "lm_head")) for n in names)  # tied: the head is the table
    assert len([*folder.glob("model-*.safetensors")]) > 1
    assert (folder / "config.json").read_text() == '{"model_type": "llama"}\n'
    assert status(trained)["metrics"]["export_gap"] < 1e-5


@pytest.mark.parametrize("layout", [{"pp": 2, "shard": 2}, {}], ids=["four ranks", "one rank"])
def test_what_went_out_to_hugging_face_comes_back_with_the_same_loss(
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
        warnings.simplefilter("ignore")  # of one process: that it is one process
        dcp.save({**state, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    words = ["steps=[import,evaluate]", f"steps.import.src={tmp_path}/dcp", "steps.import.names=llama", BATCH]
    folder = run(tmp_path / "run", *words)
    assert status(folder)["metrics"]["val_loss"] == status(trained)["metrics"]["val_loss"]
    assert "import: left out, for it is no tensor: step\n" in capfd.readouterr().out


def test_rank_folders_of_mindspore_come_in_with_their_strategy(trained: Path, tmp_path: Path) -> None:
    merged = tmp_path / "strategy.ckpt"
    strategy = open_checkpoint(last(trained)).strategy
    write_strategy(merged, merged_file(strategy.only("param")), "protobuf")
    transform_checkpoints(last(trained), tmp_path / "full", "full")
    one = read_full(tmp_path / "full" / "rank_0" / "full0.safetensors")
    plain = {n: one[n] for n in strategy.only("param").entries}
    for rank in range(4):
        (tmp_path / "ranks" / f"rank_{rank}").mkdir(parents=True)
        pieces = held(strategy.only("param"), rank, {n: bytes(b.data) for n, b in plain.items()})
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
    kept = "every number kept" if dtype == torch.bfloat16 else "each number rounded to the nearest"
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
    assert "; these are a Llama's names as transformers has them\n" in said
    assert said.endswith("    try:    steps.import.names=llama\n")
    assert not (tmp_path / "run").exists()


def test_training_goes_on_from_what_was_imported(trained: Path, tmp_path: Path) -> None:
    words = ["steps=[import,train,save]", f"steps.import.src={trained}/exports/hf", "steps.import.names=llama"]
    first = run(tmp_path / "a", *words, steps=2)
    assert checkpoints(first) == ["step-000000", "step-000002"]
    assert losses(first)[0] < losses(trained)[0]
    again = shutil.copytree(first, tmp_path / "b")
    said = status(again)
    (again / "status.json").write_text(json.dumps(said | {"status": "running", "steps": [], "metrics": {}}))
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
    assert "import: not again, for the run has gone on to step-000002" in capfd.readouterr().out
    assert tensors(run(tmp_path / "straight", *words, steps=4), 4) == tensors(folder, 4)


def test_verify_says_in_one_line_that_all_is_well(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, f"run_dir={trained.parent}/look", "steps=[verify]", f"steps.verify.src={last(trained)}"]) == 0
    line = r"verify: \S+/step-000002: \d+ tensors, [\d.]+ KB, in \d+ files: whole, every digest right"
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


def table(home: Path, *rows: str) -> None:
    """A recipe of one's own with a table of names."""
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
            f"{gate.format(k)} and {gate.format(k).replace('gate', 'up')} would both be layers.{k}.mlp.up.weight; "
            "null leaves one of them out",
            f"{row}:7:7",
        )
        for k in range(2)
    ] + [
        (
            "steps.import.names",
            "no row of the table is about model.layers.0.post_attention_layernorm.weight, model.layers.0.mlp.down_proj."
            "weight, model.layers.1.post_attention_layernorm.weight, model.layers.1.mlp.down_proj.weight "
            f"of {source}; add rows, with null to leave a tensor out",
            f"{row}:4:5",
        ),
        (
            "steps.import.names.model.norm",
            f"{source}: the model has no place for normal.weight; null in the place of this row's name leaves them out",
            f"{row}:10:7",
        ),
        (
            "steps.import.names",
            f"{source}: nothing is there for the model's layers.0.mlp_norm.weight, layers.0.mlp.gate.weight, "
            "layers.0.mlp.down.weight, layers.1.mlp_norm.weight, layers.1.mlp.gate.weight, layers.1.mlp.down.weight "
            "and 1 more; these are a Llama's names as transformers has them",
            f"{row}:4:5",
        ),
        (
            r"steps.import.names.^model\.layers\.(\d+)\.post_attention_norm\.(.+)",
            f"no tensor of {source} has a name that this row is about",
            f"{row}:9:7",
        ),
    ]
    assert said.out == ""
    assert not (tmp_path / "run").exists()


def test_a_plan_is_shown_without_the_weights_that_it_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "steps=[import]", "steps.import.src=weights/none", "show=plan"]) == 0
    told = "steps.import.src: weights/none is not here: whether it fits the model is seen when the run starts\n"
    assert capsys.readouterr().out.endswith(f"\n{told}")


TRANSFORM = ["steps=[transform]", "steps.transform.src=last"]
MERGE = ["steps=[merge_strategies]", "steps.merge_strategies.src=half"]
AT_THE_DOOR = {
    "a strategy of another model": (
        [*TRANSFORM, "steps.transform.strategy=one.json"],
        "steps.transform.strategy = one.json: the strategies do not fit:",
    ),
    "a strategy that is no JSON": (
        ["steps=[train,save,transform]", "steps.transform.strategy=bad.json"],
        "steps.transform.strategy = bad.json: not a MindSpore strategy file (json): no JSON",
    ),
    "stages that cannot be made": (
        [*TRANSFORM, "steps.transform.stages=3", "steps.transform.nproc=6"],
        "steps.transform.stages = 3: cannot be made of 2 stages; stages are merged, not cut",
    ),
    "a target that is not empty": (
        ["steps=[train,save,transform]", "steps.transform.dst=half"],
        "steps.transform.dst = half: the destination is not empty; give another, or overwrite: true",
    ),
    "a target that is no checkpoint": (
        [*TRANSFORM, "steps.transform.dst=half", "steps.transform.overwrite=true"],
        "steps.transform.dst = half: the destination is not empty and no checkpoint, so it is not overwritten either",
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
        "steps.transform.src: cut/rank_1/model.safetensors: a file from another place: it says format tp, not pt",
    ),
    "names of an export that the run does not have": (
        ["--config-dir=.", "recipe=export", "steps=[train,save,export]", "steps.export.format=hf"],
        "steps.export.names: no row of the table is about embed.weight, ",
    ),
    "names of an export that its source does not have": (
        ["--config-dir=.", "recipe=export", "steps=[export]", "steps.export.format=hf", "steps.export.src=last"],
        "steps.export.names: no row of the table is about embed.weight, ",
    ),
    "an export that is a folder": (
        ["steps=[train,save,export]", "steps.export.path=half"],
        "steps.export.path = half: the export is one file, this is a folder; give a file name in it",
    ),
    "a truncated source": (
        ["steps=[import]", "steps.import.src=short.safetensors"],
        "steps.import.src = short.safetensors: truncated: its tensors end at byte ",
    ),
    "pieces without a strategy": (
        ["steps=[import]", "steps.import.src=ranks"],
        "steps.import.src = ranks: pieces of ranks 0, 1; give the strategy file that they were saved with",
    ),
    "whole tensors with a strategy": (
        ["steps=[import]", "steps.import.src=hf", "steps.import.strategy=one.json"],
        "steps.import.src = hf: whole tensors, which have no strategy; leave strategy out",
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
        "steps.merge_strategies.dst = cut/strategy/stage0.json: the destination is in the checkpoint ",
    ),
    "an export over its source": (
        ["steps=[export]", "steps.export.src=last", "steps.export.path=last/rank_0/model.safetensors"],
        "steps.export.path = last/rank_0/model.safetensors: the destination is in the checkpoint ",
    ),
    "a head with a flipped bit": (
        ["steps=[transform]", "steps.transform.src=flipped"],
        "steps.transform.src: flipped/rank_1/model.safetensors: its header is not the one that the manifest was "
        "written with",
    ),
    "pickles": (
        ["steps=[import]", "steps.import.src=pickled"],
        "steps.import.src = pickled: only pytorch_model.bin, pickled, which is never loaded; save it as safetensors "
        "first",
    ),
    "a name that a terminal would obey": (
        ["steps=[import]", "steps.import.src=red.safetensors"],
        "steps.import.names: red.safetensors: the model has no place for a\\x1b[31m\\nb; names is a table ",
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
        "steps.merge_strategies.dst = out.ckpt: form json has names that end in .json",
    ),
}


@pytest.mark.parametrize("case", AT_THE_DOOR)
def test_what_heads_and_manifests_tell_is_told_before_anything_is_started(
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
        shutil.copy(shard, f"ranks/rank_{rank}")
    Path("recipes").mkdir()
    head = "defaults: [override /steps: [train, save, export]]\nsteps: {export: {names: {emb: x}}}\n"
    Path("recipes/export.yaml").write_text(head)
    words, text = AT_THE_DOOR[case]
    before = sorted(Path().rglob("*"))
    assert main([*words[:-1], *TINY[:-1], *words[-1:], "train.steps=2", "runs=runs"]) == 2
    said = capsys.readouterr()
    problems = [line for line in said.err.splitlines()[2:] if re.match(r"  steps", line)]
    assert [line[: len(text) + 2] for line in problems][:1] == [f"  {text}"]
    assert len(problems) == 1 or "terminal" in case
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
    text = f"run_dir: {folder}/status.json: damaged: it does not say which steps are done; without the file all are "
    assert f"  {text}done again\n" in capfd.readouterr().err


REFUSED = {
    "a source that is not there": (
        ["steps=[import]", "steps.import.src=nowhere"],
        "steps.import.src = nowhere: no such file or folder",
    ),
    "a source that is nothing of that kind": (
        ["steps=[import]", "steps.import.src=empty"],
        "steps.import.src = empty: none of a Hugging Face folder (model.safetensors or model.safetensors.index.json), "
        "a torch DCP folder (.metadata), rank_<k> folders",
    ),
    "a table with a bad pattern": (
        ["--config-dir=mine", "recipe=table", "steps=[import]", "steps.import.src=file.safetensors"],
        "steps.import.names: ^( is no regular expression: missing ), unterminated subpattern at position 1",
    ),
    "names that are no table": (
        ["steps=[import]", "steps.import.src=file.safetensors", "steps.import.names=lama"],
        "steps.import.names = lama: should be llama or a group of keys, did you mean 'llama'?",
    ),
    "a size that is none": (
        ["steps=[train,save,export]", "steps.export.max_shard_size=much"],
        "steps.export.max_shard_size: 'much' is no size; give bytes, or text as 500MB or 2GiB",
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
        "steps.export.beside: config.json: no such file to copy beside the model",
    ),
    "weights from two places": (
        ["steps=[import,train]", "steps.import.src=file.safetensors", "checkpoint.resume=elsewhere"],
        "checkpoint.resume = elsewhere: cannot go on from there: elsewhere: no checkpoint: no such folder\n"
        "checkpoint.resume = elsewhere: the step 'import' says that the weights come from elsewhere\n"
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
