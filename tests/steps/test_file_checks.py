import os
from pathlib import Path

import pytest

from launcher.checkpoint.manifest import NoManifest
from launcher.errors import Problem
from launcher.job.compose import compose
from launcher.job.schema.steps import Export
from launcher.steps import module
from launcher.steps.export import with_defaults
from launcher.steps.file_checks import FileChecks, no_manifest
from tests.checkpoint.saving import filled, save, small

ANOTHER = "name another place"
PIPE = "is a named pipe, not a regular file"
WRONG = {
    "steps.export.path=pipe": f"pipe: {PIPE}",
    "steps.export.path=/dev/null": "/dev/null: is a device, not a regular file",
    "steps.export.path=.": ".: a folder, but the export is one file; give a file name in it",
    "steps.export.path=runs": "runs: this folder contains the folder of this run, {here}/runs/run; name another place",
    "steps.export.path=runs/run/0001": "runs/run/0001: this run writes its own files there; name another place",
    "steps.export.path=. steps.export.format=hf": (
        ".: the destination is not empty; give another, or set overwrite: true"
    ),
    "steps.export.path=. steps.export.format=hf steps.export.overwrite=true": (
        ".: the destination is not empty and not a folder with only a model, so it is never overwritten"
    ),
    "steps.export.path=text/x": "the folder of this output cannot be made at text: text is not a folder",
    "steps.transform.dst=.": ".: the destination is not empty; give another, or set overwrite: true",
    "steps.transform.dst=pipe": "pipe: the destination is a file, not a folder",
    "steps.transform.dst=broken": "broken: is not a folder",
    "steps.transform.dst=runs": (
        "runs: this folder contains the folder of this run, {here}/runs/run; name another place"
    ),
    "steps.transform.dst=a/run run_dir=a": None,
    "steps.transform.dst=a/transformed run_dir=a": None,
    "steps.transform.dst=a run_dir=a": "a: this folder contains the folder of this run, {here}/a; name another place",
    "steps.transform.dst=a/logs run_dir=a": "a/logs: this run writes its own files there; name another place",
    "steps.transform.dst=a/checkpoints/new run_dir=a": (
        "a/checkpoints/new: this run writes its own files there; name another place"
    ),
    "steps.transform.dst=new steps.export.path=new/model": "new/model: steps.transform writes there; {another}",
    "steps.transform.dst=new/a steps.export.path=new/b": None,
    "steps.predict.to=pipe.jsonl": f"pipe.jsonl: {PIPE}",
    "steps.predict.to=folder.jsonl": "folder.jsonl: is a folder, not a file",
    "steps.predict.to=run:out.jsonl": None,
    "steps.predict.to=new.jsonl steps.again.to=new.jsonl +steps.again.kind=predict": (
        "new.jsonl: steps.predict writes there; {another}"
    ),
    "steps.merge_strategies.dst=.": ".: is a folder, not a file",
    "steps.merge_strategies.dst=pipe": f"pipe: {PIPE}",
    "steps.merge_strategies.dst=a/strategy/all.json run_dir=a": None,
    "steps.calibrate.to=folder/x.yaml": None,
}


@pytest.mark.parametrize("words", WRONG)
def test_an_output_that_cannot_be_written_is_refused_before_anything_starts(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "folder.jsonl"):
        Path(folder).mkdir()
    Path("text").write_text("text")
    Path("broken").symlink_to("nothing")
    os.mkfifo("pipe")
    os.mkfifo("pipe.jsonl")
    before = sorted(Path().rglob("*"))
    verbs = dict.fromkeys(word.split(".")[1] for word in words.split() if word.startswith("steps."))
    steps = ",".join(["train", "save", *(v for v in verbs if v != "again")])
    job = compose(["name=run", f"steps=[{steps}]", *words.split()]).job
    problems: list[Problem] = []
    for name in job.steps:
        check = getattr(module(job.steps[name]), "check", None)
        problems += check(job.steps[name], FileChecks(name, job)) if check is not None else []
    expected = WRONG[words]
    there = [] if expected is None else [expected.format(here=tmp_path, another=ANOTHER)]
    assert [problem.text for problem in problems] == there
    assert sorted(Path().rglob("*")) == before


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = compose(["steps=[train,save,transform]", "steps.transform.dst=.", "runs=/elsewhere"]).job
    problems = FileChecks("transform", job).unwritable("dst", ".", "folder")
    text = ".: this folder would be replaced, and the current folder is in it; name a new one"
    assert problems == [Problem("steps.transform.dst", text)]


def test_a_folder_of_runs_is_no_checkpoint_and_the_cure_names_their_newest(tmp_path: Path) -> None:
    for n, folder in enumerate(("lm/0001", "lm/0002", "mlp/0001")):
        save(tmp_path / folder / "checkpoints/step-000002", small(), filled(small()), {"step": 2})
        manifest = tmp_path / folder / "checkpoints/step-000002/manifest.json"
        os.utime(manifest, ns=(n, 5 if folder == "lm/0002" else n))
    (tmp_path / "lm/latest").symlink_to("0002")
    newest = tmp_path / "lm/0002/checkpoints/step-000002"
    cure = f"steps.load.path={newest}"
    for folder in (tmp_path, tmp_path / "lm"):
        text = f"{folder}: holds runs; their newest checkpoint is {newest}"
        assert no_manifest("steps.load.path", NoManifest(folder)) == Problem("steps.load.path", text, cure)
    nothing = NoManifest(tmp_path / "mlp/0001/checkpoints/step-000002/rank_0")
    assert no_manifest("steps.load.path", nothing) == Problem("steps.load.path", str(nothing))


def test_a_model_folder_that_does_not_exist_is_no_traceback_of_the_export(tmp_path: Path) -> None:
    """The tokenizer of the data may be elsewhere; ``model.path`` has its own check."""
    (tmp_path / "tokenizer.json").write_text("{}")
    words = ["model=hf", f"model.path={tmp_path}/nope", "data=text", "data.tokenizer=file", "data.vocab_size=300"]
    job = compose([*words, f"data.tokenizer_file={tmp_path}/tokenizer.json", "steps=[train,save,export]"]).job
    export = job.steps["export"]
    assert isinstance(export, Export)
    assert with_defaults(export, job).beside == (f"{tmp_path}/tokenizer.json",)
