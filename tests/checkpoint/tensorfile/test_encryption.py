"""Encrypted checkpoints are read like any other with the key, and not at all without it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint import open_checkpoint, partial, read_extra, read_rank, single, transform, verify, write_rank
from launcher.checkpoint.export_one_file import export
from launcher.checkpoint.foreign.import_checkpoint import import_full
from launcher.checkpoint.layout.strategy import Entry, Strategy
from launcher.checkpoint.store import commit
from launcher.checkpoint.tensorfile.encryption import (
    ANOTHER,
    BLOCK,
    FORMS,
    HEAD,
    TAG,
    EncryptedFile,
    Encryptor,
    encrypted_size,
    key_id,
)
from launcher.checkpoint.tensorfile.safetensors import Blob, read_header
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import Full, blobs_of_rank, filled, save

KEY, OTHER = bytes(range(32)), bytes(32)
GRID = Grid((("dp_shard", 2),))


def strategy() -> Strategy:
    """A tensor of more than two blocks split in rows, one split in columns, and a scalar."""
    rows, columns = ((("dp_shard",), ()), ((), ("dp_shard",)))
    shapes = {"rows": ((3000, 513), rows), "columns": ((64, 4098), columns)}
    entries = {n: Entry(Layout(GRID, shape, split), "float32", "param", ()) for n, (shape, split) in shapes.items()}
    return Strategy(GRID, entries | {"optim.step.rows": Entry(Layout(GRID, (), ()), "float32", "optim", ())})


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Full]:
    monkeypatch.setenv("CHECKPOINT_KEY", KEY.hex())
    final, full = tmp_path / "checkpoint", filled(strategy())
    written(final, full)
    return final, full


def written(final: Path, full: Full) -> None:
    plan, rng = strategy(), {"rng": Blob.of("uint8", (2,), b"ab")}
    records = [
        write_rank(partial(final), rank, plan, blobs_of_rank(plan, rank, full), rng, "env:CHECKPOINT_KEY")
        for rank in range(2)
    ]
    commit(partial(final), final, records, {"step": 1})


def full_tensors(folder: Path) -> Full:
    found = open_checkpoint(folder)
    return {name: bytes(b.data) for name, b in read_rank(found, single(found.strategy), 0).items()}


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is what is tested
        full_tensors(folder)
    return str(caught.value)


def test_an_encrypted_checkpoint_is_read_transformed_and_exported_unchanged(
    sealed: tuple[Path, Full], tmp_path: Path
) -> None:
    folder, full = sealed
    assert full_tensors(folder) == full
    assert verify(folder) == []
    assert bytes(read_extra(open_checkpoint(folder), 1)["rng"].data) == b"ab"
    transform(folder, tmp_path / "one", single(strategy()))
    assert full_tensors(tmp_path / "one") == full
    assert open_checkpoint(tmp_path / "one").key == KEY
    export(folder, tmp_path / "full.safetensors")
    header = read_header(tmp_path / "full.safetensors")
    data = (tmp_path / "full.safetensors").read_bytes()
    for name, slot in header.entries.items():
        assert data[slot.start : slot.stop] == full[name]


def test_no_byte_of_a_tensor_and_no_key_is_on_the_disk(sealed: tuple[Path, Full]) -> None:
    folder, full = sealed
    everything = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert full["rows"][:16] not in everything
    assert KEY not in everything
    assert KEY.hex().encode() not in everything
    assert b'"key": "env:CHECKPOINT_KEY"' in everything
    assert KEY.hex() not in repr(open_checkpoint(folder))
    assert repr(KEY) not in repr(open_checkpoint(folder))


def test_a_wrong_key_is_named_by_its_id(sealed: tuple[Path, Full], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = sealed
    monkeypatch.setenv("CHECKPOINT_KEY", OTHER.hex())
    text = (
        f"{folder}: it is encrypted: {folder}/rank_0/extra.safetensors: wrong key: it is encrypted with key "
        f"{key_id(KEY).hex()}, this is {key_id(OTHER).hex()}; set {ANOTHER} to the place of the key: {FORMS}"
    )
    assert refusal(folder) == text
    assert verify(folder) == [text]


def test_a_file_of_another_key_in_the_folder_is_named(sealed: tuple[Path, Full]) -> None:
    folder, _ = sealed
    path = folder / "rank_1/model.safetensors"
    plain = EncryptedFile(path, KEY)
    made(path, plain.read(0, plain.size), OTHER)
    text = f"{path}: wrong key: it is encrypted with key {key_id(OTHER).hex()}, this is {key_id(KEY).hex()}"
    assert refusal(folder) == text
    assert text in verify(folder)


def test_a_file_of_another_checkpoint_with_the_same_key_is_named(sealed: tuple[Path, Full], tmp_path: Path) -> None:
    folder, full = sealed
    other = tmp_path / "other"
    written(other, filled(strategy(), 1))
    for rank, text in (
        (0, "a file of another checkpoint: its salt is not the one in the manifest"),
        (1, "a file of another rank or layout: it says rank 1, not 0"),
    ):
        path = folder / "rank_0/model.safetensors"
        shutil.copy(other / f"rank_{rank}/model.safetensors", path)
        assert refusal(folder) == f"{path}: {text}"
        assert f"{path}: {text}" in verify(folder)
    assert full_tensors(other) != full


def test_two_machines_with_two_keys_at_one_place_are_noticed_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, plan, full, records = tmp_path / "checkpoint", strategy(), filled(strategy()), []
    for rank, key in enumerate((OTHER, KEY)):
        monkeypatch.setenv("CHECKPOINT_KEY", key.hex())
        records.append(
            write_rank(partial(final), rank, plan, blobs_of_rank(plan, rank, full), None, "env:CHECKPOINT_KEY")
        )
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is what is tested
        commit(partial(final), final, records, {"step": 1})
    path = partial(final) / "rank_0/model.safetensors"
    text = f"{path}: wrong key: it is encrypted with key {key_id(OTHER).hex()}, this is {key_id(KEY).hex()}"
    assert str(caught.value) == text
    assert not final.exists()


def test_transform_and_import_encrypt_with_the_requested_key(
    sealed: tuple[Path, Full], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, full = sealed
    monkeypatch.setenv("NEW", OTHER.hex())
    transform(folder, tmp_path / "new", single(strategy()), key="env:NEW")
    save(tmp_path / "plain", strategy(), full)
    transform(tmp_path / "plain", tmp_path / "sealed", single(strategy()), key="env:NEW")
    import_full(read_rank(open_checkpoint(folder), single(strategy()), 0), tmp_path / "imported", strategy(), {},
                key="env:NEW")  # fmt: skip
    monkeypatch.delenv("CHECKPOINT_KEY")
    for name in ("new", "sealed", "imported"):
        assert full_tensors(tmp_path / name) == full
        assert open_checkpoint(tmp_path / name).key == OTHER


def test_an_environment_variable_says_where_a_moved_key_is(
    sealed: tuple[Path, Full], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, full = sealed
    monkeypatch.delenv("CHECKPOINT_KEY")
    assert refusal(folder) == (
        f"{folder}: it is encrypted: env:CHECKPOINT_KEY: this environment variable is not set; it must hold the key "
        "(openssl rand -hex 32); set LAUNCHER_CHECKPOINT_KEY to the place of the key: env:NAME (an environment "
        "variable) or file:PATH"
    )
    (tmp_path / "key").write_bytes(KEY)
    monkeypatch.setenv(ANOTHER, f"file:{tmp_path}/key")
    assert full_tensors(folder) == full
    transform(folder, tmp_path / "one", single(strategy()))
    monkeypatch.delenv(ANOTHER)
    assert full_tensors(tmp_path / "one") == full


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def block(number: int) -> str:
    return f"damaged or tampered with: block {number} cannot be decrypted with the key"


HEADED = "damaged or tampered with: its head cannot be decrypted with the key"
FIRST = HEAD + TAG
STEP = BLOCK + TAG
TAMPERED = {
    "a flipped bit": (lambda d: flipped(d, FIRST + STEP + 9), block(1)),
    "a flipped tag": (lambda d: flipped(d, FIRST + STEP - 1), block(0)),
    "another salt": (lambda d: flipped(d, 20), HEADED),
    "another size": (lambda d: flipped(d, HEAD - 8), HEADED),
    "blocks in another order": (
        lambda d: d[:FIRST] + d[FIRST + STEP : FIRST + 2 * STEP] + d[FIRST : FIRST + STEP] + d[FIRST + 2 * STEP :],
        block(0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "told"), TAMPERED.values(), ids=TAMPERED)
def test_a_file_that_was_tampered_with_is_named(change, told, sealed: tuple[Path, Full]) -> None:
    folder, _ = sealed
    path = folder / "rank_0/model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    assert refusal(folder) == f"{path}: {told}"
    assert f"{path}: {told}" in verify(folder)


def made(path: Path, plain: bytes, key: bytes = KEY) -> Path:
    with path.open("wb") as file:
        sealer = Encryptor(path, file.fileno(), len(plain), key)
        for at in range(0, len(plain), 700_001):
            sealer.write(at, memoryview(plain)[at : at + 700_001])
        sealer.finish()
    return path


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_any_range_of_an_encrypted_file_decrypts_to_its_plain_text(size: int, tmp_path: Path) -> None:
    plain = random.Random(size).randbytes(size)
    path = made(tmp_path / "a", plain)
    file = EncryptedFile(path, KEY)
    assert path.stat().st_size == encrypted_size(size)
    assert file.size == size
    assert file.read(0, size) == plain
    for start, stop in ((size // 3, size // 2), (max(0, size - 2), size), (0, min(5, size))):
        assert file.read(start, stop) == plain[start:stop]


def test_a_file_cut_short_or_grown_is_named(tmp_path: Path) -> None:
    path = made(tmp_path / "a", bytes(2 * BLOCK))
    data = path.read_bytes()
    for cut, told in (
        (data[:-STEP], f"truncated: its header says {len(data)} bytes, but it has {len(data) - STEP}"),
        (data + b"x", f"bytes were added: its header says {len(data)} bytes, but it has {len(data) + 1}"),
        (data[:30], f"truncated: an encrypted file has at least {HEAD + TAG} bytes, this one 30"),
        (b"plain", "it is not encrypted, but the manifest says that it is"),
    ):
        path.write_bytes(cut)
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is what is tested
            EncryptedFile(path, KEY)
        assert str(caught.value) == f"{path}: {told}"


def test_a_block_of_another_file_cannot_be_decrypted(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", bytes(BLOCK)), made(tmp_path / "b", bytes(BLOCK))
    a.write_bytes(a.read_bytes()[:FIRST] + b.read_bytes()[FIRST:])
    with pytest.raises(ValueError, match="block 0 cannot be decrypted with the key"):
        EncryptedFile(a, KEY).read(0, 1)


def test_the_header_of_an_encrypted_file_alone_is_refused_with_a_hint(sealed: tuple[Path, Full]) -> None:
    path = sealed[0] / "rank_0/model.safetensors"
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is what is tested
        read_header(path)
    text = f"{path}: it is encrypted: give the checkpoint folder, whose manifest says where the key is"
    assert str(caught.value) == text
