from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launcher.extras.mindspore import encryption
from launcher.extras.mindspore.ckpt import Ckpt, open_ckpt, write_ckpt
from launcher.extras.mindspore.encryption import MODES, CipherMode
from launcher.optional import install_command
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.mindspore.truth import FIXTURES, exactly

FORMATS = FIXTURES / "formats"
KEYS: dict[CipherMode, bytes] = {"AES-GCM": bytes(range(32)), "AES-CBC": bytes(range(16)), "SM4-CBC": bytes(range(16))}
FILES: dict[CipherMode, Path] = {mode: FORMATS / f"enc_{mode}_{8 * len(KEYS[mode])}.ckpt" for mode in MODES}
SPECS = {"w": TensorSpec((5, 100), "int8"), "v": TensorSpec((), "float64"), "e": TensorSpec((0, 3), "bool")}
DATA = {"w": bytes(i % 251 for i in range(500)), "v": b"12345678", "e": b""}


def contents(file: Ckpt) -> dict[str, bytes]:
    return {name: bytes(file.read(name)) for name in file.entries}


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_mindspore_encrypted_has_the_content_of_the_plain_file(mode: CipherMode) -> None:
    file, plain = open_ckpt(FILES[mode], KEYS[mode], mode), open_ckpt(FORMATS / "dtypes.ckpt")
    assert file.entries == plain.entries
    assert contents(file) == contents(plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [16, 24, 32])
@pytest.mark.parametrize("block", [64, 97, encryption.BLOCK])
def test_an_encrypted_ckpt_file_can_be_decrypted_again(
    mode: CipherMode, size: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size not in encryption.KEYS[mode]:
        assert mode == "SM4-CBC"
        return
    monkeypatch.setattr(encryption, "BLOCK", block)
    path, key = tmp_path / "x.ckpt", bytes(range(100, 100 + size))
    write_ckpt(path, SPECS, lambda name: [DATA[name][:99], DATA[name][99:]], key=key, mode=mode, part=200)
    file = open_ckpt(path, key, mode)
    assert {n: e.spec for n, e in file.entries.items()} == SPECS
    assert contents(file) == DATA
    assert bytes(file.read("w", 90, 210)) == DATA["w"][90:210]
    assert len(path.read_bytes()) > sum(map(len, DATA.values()))
    assert DATA["v"] not in path.read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_the_file_is_laid_out_as_mindspore_does_it(mode: CipherMode, tmp_path: Path) -> None:
    plain = open_ckpt(FORMATS / "dtypes.ckpt")
    path = tmp_path / "x.ckpt"
    write_ckpt(path, {n: e.spec for n, e in plain.entries.items()}, plain.chunks, key=KEYS[mode], mode=mode)
    mine, theirs = path.read_bytes(), FILES[mode].read_bytes()
    tag = 16 if mode == "AES-GCM" else 0
    assert len(mine) == len(theirs)
    for part in (slice(4), slice(4 + tag, 12 + tag), slice(28 + tag, 32 + tag)):  # magic, lengths, length
        assert mine[part] == theirs[part]
    write_ckpt(path, {n: e.spec for n, e in plain.entries.items()}, plain.chunks, key=KEYS[mode], mode=mode)
    assert path.read_bytes() != mine  # a new IV


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 250, 5))
def test_a_wrong_key_is_one_clear_error(mode: CipherMode, first: int) -> None:
    key = bytes([first + 1 & 255, *range(1, len(KEYS[mode]))])
    told = f"{FILES[mode]}: cannot be decrypted by {mode} with this dec_key: wrong key or damaged file"
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(FILES[mode], key, mode)


@pytest.mark.parametrize(("mode", "asked"), [(m, n) for m in MODES for n in MODES if m != n])
def test_a_wrong_mode_is_one_clear_error(mode: CipherMode, asked: CipherMode) -> None:
    told = f"{FILES[mode]}: encrypted with {mode}, not with dec_mode {asked}"
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(FILES[mode], bytes(16), asked)


def test_keys_and_modes_are_checked_and_no_key_is_shown() -> None:
    path = FILES["AES-GCM"]
    for key, mode, told in (
        (bytes(7), "AES-GCM", "dec_key: 7 bytes; the key of AES-GCM is 16, 24, 32 bytes"),
        (bytes(32), "SM4-CBC", "dec_key: 32 bytes; the key of SM4-CBC is 16 bytes"),
        ("secret", "AES-CBC", "dec_key: str; the key of AES-CBC is 16, 24, 32 bytes"),
        (bytes(16), "AES-ECB", "dec_mode: AES-ECB is not one of AES-GCM, AES-CBC, SM4-CBC"),
    ):
        with pytest.raises(ValueError, match=exactly(told)):
            open_ckpt(path, key, mode)  # type: ignore[arg-type]


def test_a_key_too_many_or_too_few_is_named() -> None:
    path = FILES["SM4-CBC"]
    told = (
        f'{path}: encrypted; read it with load_segmented_checkpoints, dec_key and dec_mode="SM4-CBC", '
        "and save the result in plain files for other uses"
    )
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(path)
    path = FORMATS / "dtypes.ckpt"
    told = f"{path}: a key was given, but the file is not encrypted; leave out dec_key"
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(path, bytes(16))


@pytest.mark.parametrize("mode", MODES)
def test_an_encrypted_file_cut_anywhere_is_noticed(mode: CipherMode, tmp_path: Path) -> None:
    data, path = FILES[mode].read_bytes(), tmp_path / "cut.ckpt"
    for size in range(4, len(data), 5):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=rf"\A{re.escape(str(path))}: truncated: "):
            open_ckpt(path, KEYS[mode], mode)


def test_damage_to_the_blocks_is_named(tmp_path: Path) -> None:
    data, path = bytearray(FILES["AES-CBC"].read_bytes()), tmp_path / "x.ckpt"
    path.write_bytes(data + b"more")
    told = f"{path}: byte {len(data)} does not start an encrypted block: damaged, or not encrypted"
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(path, KEYS["AES-CBC"], "AES-CBC")
    data[8] = 12
    path.write_bytes(data)
    told = f"{path}: damaged: the lengths in the encrypted block at byte 0 contradict each other"
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(path, KEYS["AES-CBC"], "AES-CBC")


def test_a_flipped_bit_does_not_pass_gcm(tmp_path: Path) -> None:
    data, path = bytearray(FILES["AES-GCM"].read_bytes()), tmp_path / "x.ckpt"
    data[-1] ^= 1
    path.write_bytes(data)
    told = f"{path}: cannot be decrypted by AES-GCM with this dec_key: wrong key or damaged file"
    with pytest.raises(ValueError, match=exactly(told)):
        open_ckpt(path, KEYS["AES-GCM"], "AES-GCM")


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    told = f"AES-GCM needs the package cryptography, which is not installed: {install_command('crypto')}"
    with pytest.raises(ModuleNotFoundError, match=exactly(told)):
        open_ckpt(FILES["AES-GCM"], KEYS["AES-GCM"])
