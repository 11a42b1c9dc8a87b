"""``checkpoint.encrypt``: the checkpoints of a run cannot be read without the key."""

from __future__ import annotations

import importlib.util
import re

import pytest

from launcher.__main__ import main
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.optional import install_command
from tests.checkpoint.saving import filled, save, small
from tests.run.launching import BATCH, TINY, losses, run, say, shape

KEY = "5a" * 32
SEALED = "checkpoint.encrypt=env:CHECKPOINT_KEY"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("CHECKPOINT_KEY", KEY)


def plain(folder, step):
    checkpoint = open_checkpoint(folder / f"checkpoints/step-{step:06d}")
    return {n: bytes(b.data) for n, b in read_rank(checkpoint, single(checkpoint.strategy), 0).items()}


def test_an_encrypted_run_goes_on_to_the_same_bits_and_its_key_is_nowhere(tmp_path, capsys):
    two = [*shape(shard=2), "schedule=constant"]
    more = [*two, "steps=[train,save,transform,export]"]
    run(tmp_path / "run", SEALED, *two, "checkpoint.async=true", "checkpoint.every=1", steps=2)
    run(tmp_path / "run", SEALED, *more, steps=4)
    out = capsys.readouterr().out
    run(tmp_path / "straight", *more, steps=4)
    assert plain(tmp_path / "run", 4) == plain(tmp_path / "straight", 4)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert KEY not in out
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or not any(k in path.read_bytes() for k in (KEY.encode(), bytes.fromhex(KEY)))
    assert "encrypt: env:CHECKPOINT_KEY" in (tmp_path / "run/config.yaml").read_text()
    assert SEALED in (tmp_path / "run/command.txt").read_text() or SEALED in (tmp_path / "run/status.json").read_text()


def refused(tmp_path, capsys, place):
    assert main([*TINY, f"runs={tmp_path}/runs", f"checkpoint.encrypt={place}", *shape()]) == 2
    assert not (tmp_path / "runs").exists()
    return capsys.readouterr().err


def test_a_key_that_is_not_there_is_refused_before_anything_starts(tmp_path, capsys):
    assert refused(tmp_path, capsys, "env:NOBODY") == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  checkpoint.encrypt: env:NOBODY: this environment variable is not set; it must hold the key "
        "(openssl rand -hex 32)\n"
        "    set by: checkpoint.encrypt=env:NOBODY (command line)\n"
    )


def test_a_key_in_the_configuration_is_refused_and_not_shown(tmp_path, capsys):
    err = refused(tmp_path, capsys, KEY)
    assert "this does not say where the key is; never put the key itself into a configuration" in err
    assert KEY not in err


def test_without_cryptography_the_command_to_install_it_is_told(tmp_path, capsys, monkeypatch):
    before = importlib.util.find_spec
    monkeypatch.setattr(
        "launcher.checkpoint.tensorfile.encryption.find_spec", lambda n: None if n == "cryptography" else before(n)
    )
    install = install_command("crypto")
    told = f"encrypted checkpoints need the package cryptography, which is not installed: {install}"
    assert told in refused(tmp_path, capsys, "env:CHECKPOINT_KEY")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An encrypted run of two steps on one rank, with the original key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINT_KEY", KEY)
        folder = tmp_path_factory.mktemp("trained") / "run"
        return run(folder, SEALED, *shape(), "schedule=constant", steps=2)


@pytest.mark.parametrize("value", ["", "a5" * 32], ids=["no key", "another key"])
@pytest.mark.parametrize("how", ["run_dir", "checkpoint.resume", "steps.load.path"])
def test_without_its_key_a_run_does_not_go_on(how, value, trained, tmp_path, capsys, monkeypatch):
    """It is refused before anything starts, whichever setting names the checkpoint."""
    monkeypatch.setenv("CHECKPOINT_KEY", value)
    path = trained / "checkpoints/step-000002"
    named = {"run_dir": trained}.get(how, path)
    more = ["steps=[load,train]"] if how == "steps.load.path" else []
    before = sorted(trained.rglob("*"))
    words = [*TINY, f"runs={tmp_path}/runs", *shape(), "schedule=constant", "train.steps=3", *more, f"{how}={named}"]
    assert main(words) == 2
    err = capsys.readouterr().err
    why = "wrong key: it is encrypted with key " if value else "env:CHECKPOINT_KEY: this environment variable is not "
    where, kind = (trained, "run folder") if how == "run_dir" else (path, "checkpoint")
    assert f"  {how}: {where}: cannot resume from this {kind}: {path}: it is encrypted: " in err.replace(" = ", ": ", 1)
    assert why in err
    cure = "set LAUNCHER_CHECKPOINT_KEY to the place of the key: env:NAME (an environment variable) or file:PATH"
    assert f"; {cure}\n" in err
    assert KEY not in err
    assert sorted(trained.rglob("*")) == before
    assert not (tmp_path / "runs").exists()


def test_import_and_transform_encrypt_too_and_export_says_that_it_does_not(trained, tmp_path, capsys):
    file = tmp_path / "full.safetensors"
    run(tmp_path / "a", *shape(), f"steps.export.path={file}", "steps=[train,save,export]", steps=1)
    assert "not encrypted" not in capsys.readouterr().out
    steps = ["steps=[import,transform,export,verify,inspect]", f"steps.import.src={file}"]
    folder = run(tmp_path / "b", SEALED, *shape(), *steps)
    out = capsys.readouterr().out
    assert re.search(r"export: .*, not encrypted\n", out)
    for name in ("checkpoints/step-000000", "transformed"):
        assert open_checkpoint(folder / name).key == bytes.fromhex(KEY)
    assert KEY not in out


@pytest.mark.parametrize("step", ["inspect", "verify", "transform", "export"])
def test_a_checkpoint_that_is_not_encrypted_is_refused_where_there_is_a_key(step, tmp_path, capsys):
    """Otherwise anyone who can write to the folder could replace a checkpoint."""
    src = tmp_path / "plain"
    save(src, small(), filled(small()))
    words = [*TINY, f"runs={tmp_path}/runs", *shape(), SEALED, f"steps=[{step}]", f"steps.{step}.src={src}"]
    assert main([*words, "show=plan"] if step == "transform" else words) == 2
    assert (
        f"{src}: it is not encrypted but checkpoint.encrypt is set: it cannot be verified; "
        "checkpoint.accept_plain=true reads it anyway\n"
    ) in capsys.readouterr().err.replace(" = ", ": ", 1)
    if step == "inspect":
        assert main([*words, "checkpoint.accept_plain=true"]) == 0
        out = capsys.readouterr().out
        assert f"inspect: {src}; it is not encrypted, so it cannot be verified\n" in out
        assert "checkpoint.accept_plain" in out


@pytest.mark.parametrize("how", ["run_dir", "checkpoint.resume"])
def test_a_run_goes_on_from_what_is_not_encrypted_only_when_told(how, tmp_path, capsys):
    before = run(tmp_path / "run", *shape(), "schedule=constant", steps=1)
    path = before / "checkpoints/step-000001"
    words = [*TINY, f"runs={tmp_path}/runs", *shape(), "schedule=constant", "train.steps=2", SEALED,
             f"{how}={before if how == 'run_dir' else path}"]  # fmt: skip
    capsys.readouterr()
    assert main(words) == 2
    assert "it is not encrypted but checkpoint.encrypt is set: it cannot be verified" in capsys.readouterr().err
    assert main([*words, "checkpoint.accept_plain=true"]) == 0
    told = "resuming from step-000001, after 1 of 2 steps; it is not encrypted, so it cannot be verified\n"
    assert told in capsys.readouterr().out


def refusal(capsys, *words):
    assert main([*TINY, *shape(), "schedule=constant", *words]) == 2
    return capsys.readouterr().err


def test_encryption_is_not_dropped_in_silence(trained, tmp_path, capsys, monkeypatch):
    """This holds in the folder of an encrypted run and where its checkpoint is resumed; evaluations write none."""
    monkeypatch.chdir(tmp_path)
    path = trained / "checkpoints/step-000002"
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file() and p.name != ".lock"}
    own = "checkpoint.accept_changes=[checkpoint.encrypt]"
    why = f"{path} is encrypted, but this run's checkpoints would not be; '{own}' allows that"
    text = f"  checkpoint.encrypt: null: {why}\n"
    more = ["train.steps=3", "show=plan"]
    for words in (
        [f"run_dir={trained}", "train.steps=3"],
        [f"run_dir={trained}", *more],
        [f"run_dir={trained}", "checkpoint.resume=never", "train.steps=1"],
        [f"checkpoint.resume={path}", *more],
        [f"steps.load.path={path}", "steps=[load,train]", *more],
        [f"run_dir={trained}", "steps=[save]"],
    ):
        err = refusal(capsys, *words)
        assert text in err.replace(" = null: ", ": null: ")
        assert err.endswith("    try:    checkpoint.encrypt=env:CHECKPOINT_KEY\n")
        assert err.startswith("error: 1 problem in this request")
    for words in ([SEALED, *more], [own, *more], ["steps=[evaluate]", BATCH, "show=plan"]):
        assert main([*TINY, *shape(), "schedule=constant", f"run_dir={trained}", *words]) == 0
    err = refusal(capsys, f"run_dir={trained}", "checkpoint.encrypt=null", *more)
    assert err.endswith(f"    try:    checkpoint.encrypt=null '{own}'\n")
    assert {p: p.read_bytes() for p in trained.rglob("*") if p.is_file() and p.name != ".lock"} == before
    run(tmp_path / "plain", *shape(), "schedule=constant", f"checkpoint.resume={path}", own, steps=3)
    assert open_checkpoint(tmp_path / "plain/checkpoints/step-000003").manifest.key is None


def test_latest_cannot_lead_an_encrypted_run_back(tmp_path, capsys):
    words = [SEALED, *shape(), "schedule=constant", "checkpoint.every=2", "checkpoint.keep=null"]
    folder = run(tmp_path / "run", *words, steps=6)
    file = folder / "checkpoints/latest"
    old = file.read_text().replace("step-000006", "step-000002")
    file.write_text(old)
    say(folder, status="running", steps=[])
    assert main([*TINY, f"run_dir={folder}", *words, "train.steps=6"]) == 2
    cure = "remove it to use the checkpoint of the highest step"
    why = f"{file}: damaged or tampered with: its MAC does not match its content; {cure}"
    assert f"  run_dir: {folder}: cannot resume from this run folder: {why}\n" in capsys.readouterr().err
    file.write_text("step-000002\n")
    assert main([*TINY, f"run_dir={folder}", *words, "train.steps=6", "show=plan"]) == 2
    assert f"{file}: it has no MAC, and the checkpoints are encrypted: " in capsys.readouterr().err
    file.unlink()
    run(folder, *words, steps=8)
    assert "resuming from step-000006, after 6 of 8 steps" in capsys.readouterr().out
