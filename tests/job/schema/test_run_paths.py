"""Paths of other machines are refused by name in every setting that takes a path."""

from __future__ import annotations

import re

import pytest

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema import keys
from launcher.job.schema.paths import local, unusable

STEPS = keys.kinds(keys.at(("steps", "any"), {}))
EVERY = dict(keys.noted()) | {
    f"steps.{kind}.{name}": keys.typed(field)
    for kind, step in STEPS.items()
    for name, field in step.model_fields.items()
}
NO_PATHS = {
    "checkpoint.best", "checkpoint.encrypt", "cluster.name", "data._target_", "launch.k8s.gpu", "launch.k8s.image",
    "launch.k8s.python", "launch.slurm.account", "launch.slurm.container", "launch.slurm.partition",
    "logger.mlflow.experiment", "logger.mlflow.name", "logger.mlflow.tracking_uri", "logger.trackio.name",
    "logger.trackio.project", "logger.trackio.space_id", "logger.wandb.entity", "logger.wandb.group",
    "logger.wandb.name", "logger.wandb.project", "loss._target_", "model._target_", "model.lora.modules",
    "optim._target_",
    "parallel.recompute.modules", "recipe", "schedule._target_", "steps.export.max_shard_size", "steps.import.prefix",
    "steps.prepare.end_of_document", "steps.prepare.field", "steps.sample.prompt", "steps.transform.prefix",
    "sweep.metric", "train.compile.backend", "train.compile.modules", "train.early_stop.metric",
}  # fmt: skip
"""Settings that take any text, and no path: a new one that is a path has the type ``FilePath``."""


def takes_any_text(note):
    return all(keys.accepts(note, text) for text in ("plain", "s3://bucket/x.json"))


def test_every_setting_that_takes_any_text_is_known_to_be_no_path():
    assert {key for key, note in EVERY.items() if takes_any_text(note)} <= NO_PATHS


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf", "https", "abfss"])
@pytest.mark.parametrize("key", ["runs", "run_dir", "data.path", "checkpoint.resume", "steps.export.path"])
def test_paths_with_a_remote_scheme_are_refused_by_name(key, scheme):
    with pytest.raises(RequestError) as caught:
        compose(["steps=[train,save,export]", f"{key}={scheme}://bucket/x"])
    (problem,) = caught.value.problems
    why = f"should be a path of this machine: {scheme}:// is not read or written; mount it, or copy the files"
    assert problem.key == key
    assert problem.text.removeprefix(f"{scheme}://bucket/x: ").startswith(why)


def test_an_item_of_a_list_is_refused():
    with pytest.raises(RequestError, match=r"data\.path: s3://b/x: should be a path of this machine"):
        compose(["data=tokens", "data.path=[a.bin,s3://b/x]"])


def test_a_file_url_says_what_to_write():
    for url, prefix in (("file:///tmp/x", "file://"), ("file:/tmp/x", "file:")):
        with pytest.raises(RequestError) as caught:
            compose([f"runs={url}"])
        (problem,) = caught.value.problems
        assert problem.text == f"{url}: should be a path: write /tmp/x without {prefix}"
        assert problem.cure == "runs=/tmp/x"


@pytest.mark.parametrize("path", [" s3://b/x", "./s3://b/x", "/work/s3://b/x"])
def test_a_url_with_something_before_it_is_refused(path: str) -> None:
    assert unusable(path).startswith("should be a path of this machine: s3:// is not read or written;")


@pytest.mark.parametrize("path", ["s3:/b/x", "dbfs:/x", " gs:/b"])
def test_a_url_as_pathlib_writes_it_is_refused(path: str) -> None:
    folder = path.strip().partition("/")[0]
    assert unusable(path) == (
        f"should be a path of this machine: {folder}/ is not read or written; mount it, or copy the files, and "
        f"name the folder; a folder that is called {folder} is written ./{folder}"
    )
    with pytest.raises(RequestError) as caught:
        compose([f"runs='{path}'"])
    assert [p.cure for p in caught.value.problems] == [""]


def test_the_file_of_a_key_is_a_path() -> None:
    with pytest.raises(RequestError, match=r"should be a path of this machine: s3:// is not read or written"):
        compose(["checkpoint.encrypt='file:s3://b/key'"])


REMOTE = (
    "should be a path of this machine: s3:// is not read or written; mount it, or copy the files, and name the folder"
)


@pytest.mark.parametrize("words", [
    ("status", "s3://b/x"), ("logs", "s3://b/x"), ("cancel", "s3://b/x"), ("recipe=s3://b/x.yaml",),
    ("--config-dir", "s3://b/x"), ("-m", "sweep_dir=s3://b/x", "seed=0,1"),
], ids=" ".join)  # fmt: skip
def test_an_argument_that_names_a_folder_is_a_path(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 1 problem in this request; nothing was started\n")
    assert f"s3://b/x{'.yaml' * ('recipe' in words[0])}: {REMOTE}\n" in error


UNUSABLE = {
    "": "should not be empty",
    "  ": "should not be empty",
    "a\x1bb": "should be a path without line breaks and other control characters",
    "\udcff": "should be a path in UTF-8",
    "a" * 256: "should be a path of at most 4000 characters, with names of at most 255 bytes",
    "a/" * 2001: "should be a path of at most 4000 characters, with names of at most 255 bytes",
    "~": "~ is expanded only by the shell; write the folder that it stands for, or ./~ for a folder of this name",
    "~/runs": "~ is expanded only by the shell; write the folder that it stands for, "
    "or ./~/runs for a folder of this name",
    "$HOME/x": "$HOME is expanded only by the shell; write the folder that it stands for, "
    "or ./$HOME/x for a folder of this name",
}


@pytest.mark.parametrize("path", UNUSABLE, ids=range(len(UNUSABLE)))
def test_a_path_that_no_file_system_has_as_it_is_written_is_refused(path):
    with pytest.raises(ValueError, match=re.escape(UNUSABLE[path])):
        local(path)


@pytest.mark.parametrize(
    "path", ["./~", "a~", "~a b", "a/$HOME", "-", "a b", "über/x", "a" * 255, "run:x", "exp:1/x", "./exp:/x", "C:/x"]
)
def test_any_other_path_is_taken(path):
    assert local(path) == path


def test_the_cure_of_a_word_of_the_shell_is_what_it_stands_for(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for text in ("~/runs", "$HOME/runs"):
        with pytest.raises(RequestError) as caught:
            compose([f"runs='{text}'"])
        assert [p.cure for p in caught.value.problems] == ["runs=/home/me/runs"]
