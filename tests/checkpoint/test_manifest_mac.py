"""Manifests of encrypted checkpoints: if one is changed without the key, nothing in it is trusted."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import (
    commit,
    latest,
    open_checkpoint,
    partial,
    read_rank,
    single,
    step_folder,
    transform,
    verify,
)
from launcher.checkpoint import write_rank as write
from launcher.checkpoint.manifest import authentic, read_manifest, unvouched, write_manifest
from launcher.checkpoint.store import identity
from launcher.checkpoint.tensorfile.encryption import ANOTHER, FORMS, key_id
from launcher.plan.resolve.encryption import Trust
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, edit, filled, save, small

KEY, OTHER = bytes(range(32)), bytes(32)
OURS = Trust("env:CHECKPOINT_KEY")
CURE = "restore the manifest.json that was saved with this checkpoint, or use another checkpoint"


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An encrypted checkpoint of step 100."""
    monkeypatch.setenv("CHECKPOINT_KEY", KEY.hex())
    monkeypatch.setenv("NEW", OTHER.hex())
    return written(tmp_path, 100)


def written(home: Path, step: int, key: str = "env:CHECKPOINT_KEY") -> Path:
    final, plan = step_folder(home, step), small()
    full = filled(plan, step)
    records = [
        write(partial(final), rank, plan, blobs_of_rank(plan, rank, full), None, key) for rank in range(plan.grid.size)
    ]
    commit(partial(final), final, records, {"step": step})
    return final


def refused(folder: Path, trust: Trust = OURS) -> str:
    """The message that every reader gives, asserted to be the same."""
    text = refusal(lambda: open_checkpoint(folder, trust))
    assert verify(folder, trust) == [text]
    assert refusal(lambda: transform(folder, folder.with_name("out"), small(), trust=trust)) == text
    assert not folder.with_name("out").exists()
    return text


MODEL = "rank_0/model.safetensors"
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "world": lambda d: d.update(world=2),
    "strategy": lambda d: d.update(strategy="0" * 32),
    "place of the key": lambda d: d.update(key="env:NEW"),
    "size": lambda d: d["files"][MODEL].update(size=1),
    "header": lambda d: d["files"][MODEL].update(digest="0" * 32),
    "tensor": lambda d: d["files"][MODEL]["tensors"].update({"embed.weight": "0" * 32}),
    "name": lambda d: d["files"][MODEL]["tensors"].update({"more": "0" * 32}),
    "salt": lambda d: d["files"][MODEL].update(salt="0" * 64),
    "a file less": lambda d: d["files"].pop(MODEL),
    "state": lambda d: d["files"]["state.json"].update(digest="0" * 64),
    "mac": lambda d: d.update(mac=d["mac"][:-1] + "x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_a_manifest_fails_its_mac(change: Callable[[dict[str, Any]], object], sealed: Path) -> None:
    assert verify(sealed, OURS) == []
    edit(sealed, change)
    text = f"{sealed}/manifest.json: damaged or tampered with: its MAC does not match its content; {CURE}"
    assert refused(sealed) == text


def test_a_step_cannot_be_changed_with_its_digest(sealed: Path) -> None:
    path = sealed / "state.json"
    path.write_text(path.read_text().replace("100", "900"))
    assert refused(sealed) == f"{path}: damaged: its digest is not the one in the manifest"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(sealed, lambda d: d["files"]["state.json"].update(digest=digest))
    assert refused(sealed).startswith(f"{sealed}/manifest.json: damaged or tampered with: ")


def test_a_strategy_file_is_the_one_that_was_written_to_the_byte(sealed: Path) -> None:
    path = sealed / "strategy/stage0.json"
    path.write_text(path.read_text().replace(": ", ":\t", 1))  # which means the same
    assert refused(sealed) == f"{sealed}: its strategy files are not those that the manifest describes"


def test_an_encrypted_checkpoint_without_a_mac_is_refused(sealed: Path) -> None:
    edit(sealed, lambda d: d.pop("mac"))
    text = (
        f"{sealed}/manifest.json: it says that the checkpoint is encrypted but has no MAC: it may have been "
        f"changed; {CURE}"
    )
    assert refused(sealed) == text
    assert refused(sealed, Trust()) == text


def test_a_manifest_that_says_not_encrypted_is_refused_where_there_is_a_key(sealed: Path, tmp_path: Path) -> None:
    edit(sealed, lambda d: d.pop("key"))
    text = f"{sealed}/manifest.json: tampered with: it has a MAC but does not say where the key is; {CURE}"
    for trust in (OURS, Trust(), Trust(OURS.key, plain=True)):
        assert refused(sealed, trust) == text
    shutil.rmtree(sealed)
    save(sealed, small(), filled(small(), 1))  # all files are the attacker's
    assert refused(sealed) == (
        f"{sealed}: it is not encrypted but checkpoint.encrypt is set: it cannot be verified; "
        "checkpoint.accept_plain=true reads it anyway"
    )


def test_an_unencrypted_checkpoint_is_read_on_request_with_a_note(sealed: Path, tmp_path: Path) -> None:
    plain, asked = tmp_path / "plain", Trust(OURS.key, plain=True)
    save(plain, small(), filled(small()))
    transform(plain, tmp_path / "out", small(), key=OURS.key, trust=asked)
    assert verify(tmp_path / "out", OURS) == []
    doubt = "; it is not encrypted, so it cannot be verified"
    assert [unvouched(f, t) for f, t in ((plain, asked), (plain, Trust()), (sealed, asked))] == [doubt, "", ""]


def test_a_checkpoint_that_names_its_own_key_is_refused(sealed: Path) -> None:
    shutil.rmtree(sealed)
    written(sealed.parent, 100, "env:NEW")
    assert verify(sealed) == []  # no key is configured, so the source that the file names is used
    assert refused(sealed) == (
        f"{sealed}: it is encrypted: {sealed}/{MODEL}: wrong key: it is encrypted with key {key_id(OTHER).hex()}, "
        f"this is {key_id(KEY).hex()}; set {ANOTHER} to the place of the key: {FORMS}"
    )


def test_an_older_manifest_does_not_fit_the_files_of_a_newer_checkpoint(sealed: Path, tmp_path: Path) -> None:
    newer = written(tmp_path, 200)
    shutil.copy(sealed / "manifest.json", newer)
    assert refused(newer) == f"{newer}/state.json: damaged: its digest is not the one in the manifest"
    shutil.copy(sealed / "state.json", newer)
    text = f"{newer}: its name says step 200, but it is the checkpoint of step 100: rename it"
    assert refused(newer) == text
    shutil.rmtree(newer)
    shutil.copytree(sealed, newer)
    assert refused(newer) == text


def test_a_file_of_an_older_checkpoint_is_refused_even_without_digests(sealed: Path, tmp_path: Path) -> None:
    newer, file = written(tmp_path, 200), "rank_1/optimizer.safetensors"
    shutil.copy(sealed / file, newer / file)
    text = f"{newer}/{file}: a file of another checkpoint: its salt is not the one in the manifest"
    assert verify(newer, OURS) == [text]
    assert refusal(lambda: read_rank(open_checkpoint(newer, OURS), single(small()), 0, verify=False)) == text


def test_a_file_cut_short_is_noticed_though_the_manifest_says_so_too(sealed: Path) -> None:
    path = sealed / MODEL
    size = path.stat().st_size - 20
    path.write_bytes(path.read_bytes()[:size])
    assert refused(sealed) == (
        f"{sealed}: incomplete checkpoint: {MODEL} has {size} bytes, manifest.json says {size + 20}"
    )
    edit(sealed, lambda d: d["files"][MODEL].update(size=size))
    assert refused(sealed).startswith(f"{sealed}/manifest.json: damaged or tampered with: ")
    manifest = read_manifest(sealed)  # and if somebody with the key did it, the file itself shows it
    write_manifest(sealed, authentic(manifest, KEY))
    text = f"{path}: truncated: its header says {size + 20} bytes, but it has {size}"
    assert verify(sealed, OURS) == [text]


def test_during_a_change_of_keys_both_keys_are_accepted(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, out = Trust("env:NEW"), tmp_path / "new"
    monkeypatch.setenv(ANOTHER, "env:CHECKPOINT_KEY")
    transform(sealed, out, small(), key=new.key, trust=new)
    assert verify(out, new) == verify(sealed, new) == []
    monkeypatch.delenv(ANOTHER)
    assert verify(out, new) == []
    assert refused(sealed, new).startswith(f"{sealed}: it is encrypted: {sealed}/{MODEL}: wrong key: ")


def test_an_old_latest_file_does_not_lead_back_to_an_older_checkpoint(sealed: Path, tmp_path: Path) -> None:
    path = tmp_path / "latest"
    old, name = path.read_text(), "step-000100"
    assert old.startswith(f"{name}\nhmac-sha256 ")
    newer = written(tmp_path, 200)
    assert latest(tmp_path, OURS) == latest(tmp_path) == newer
    path.write_text(old)  # with its valid MAC
    assert latest(tmp_path, OURS) == newer
    path.unlink()
    assert latest(tmp_path, OURS) == newer
    cure = "remove it to use the checkpoint of the highest step"
    path.write_text(f"{name}\n")
    bare = f"{path}: it has no MAC, and the checkpoints are encrypted: it cannot be verified; {cure}"
    assert refusal(lambda: latest(tmp_path, OURS)) == bare
    text = f"{name}\nolder step-000200 {identity(read_manifest(newer))}\n"
    path.write_text(f"{text}sha256 {hashlib.sha256(text.encode()).hexdigest()}\n")
    assert refusal(lambda: latest(tmp_path, OURS)) == bare
    path.write_text(f"{text}{old.splitlines()[1]}\n")
    assert refusal(lambda: latest(tmp_path, OURS)) == (
        f"{path}: damaged or tampered with: its MAC does not match its content; {cure}"
    )


def test_a_restarted_run_is_the_newest_only_if_latest_has_a_valid_mac(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anew = written(tmp_path, 20)
    assert latest(tmp_path, OURS) == anew
    replayed = (tmp_path / "latest").read_text()
    again = written(tmp_path, 100)
    (tmp_path / "latest").write_text(replayed)
    assert latest(tmp_path, OURS) == again
    monkeypatch.delenv("CHECKPOINT_KEY")
    text = f"{again}: it is encrypted: env:CHECKPOINT_KEY: this environment variable is not set; it must hold the key "
    assert refusal(lambda: latest(tmp_path, OURS)).startswith(text)
    monkeypatch.setenv(ANOTHER, "env:NEW")  # another key
    assert ": wrong key: " in refusal(lambda: latest(tmp_path, OURS))


def test_a_changed_manifest_is_noticed_without_the_key(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sealed / "manifest.json"
    path.write_text(path.read_text().replace('"world": 4', '"world": 5'))
    text = f"{path}: damaged: its digest does not match its content"
    assert refused(sealed) == refusal(lambda: read_manifest(sealed)) == text
