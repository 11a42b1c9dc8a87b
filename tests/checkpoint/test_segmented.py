from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint import Blob, load_segmented_checkpoints
from launcher.checkpoint.files import write_file
from launcher.checkpoint.mindspore import open_ckpt
from tests.checkpoint.refusal import refusal

FORMATS = Path(__file__).parent / "mindspore" / "fixtures" / "formats"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file, names in (("a", ["layer.w", "layer.b"]), ("b", ["head.w", "adam.m"])):
        write_file(
            tmp_path / f"{file}.safetensors", {n: Blob.of("int8", (7,), n.encode()[:7].ljust(7)) for n in names}, {}
        )
    return tmp_path


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["adam.m", "head.w", "layer.b", "layer.w"]),
        ({"filter_prefix": "adam"}, ["head.w", "layer.b", "layer.w"]),
        ({"filter_prefix": ["adam", "layer.w"]}, ["head.w", "layer.b"]),
        ({"specify_prefix": ("layer", "head")}, ["head.w", "layer.b", "layer.w"]),
        ({"choice_func": lambda name: name.endswith(".w")}, ["head.w", "layer.w"]),
    ],
)
def test_the_files_of_a_folder_are_one_mapping(folder: Path, given: dict[str, Any], names: list[str]) -> None:
    found = load_segmented_checkpoints(str(folder), **given)
    assert sorted(found) == names
    assert len(found) == len(names)
    assert all(bytes(blob.data) == name.encode()[:7].ljust(7) for name, blob in found.items())


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"net": object()}, TypeError, "net: expected a torch.nn.Module, got object"),
        ({"dec_key": bytes(16)}, ValueError, "dec_key: {folder}/a.safetensors is no .ckpt file; leave out dec_key"),
        ({"dec_key": "x"}, TypeError, "dec_key: expected bytes, got str"),
        ({"dec_mode": "ROT13"}, ValueError,
         "dec_mode: 'ROT13' is not known; give AES-GCM, AES-CBC, SM4-CBC"),
        ({"filter_prefix": 1}, TypeError, "filter_prefix: expected str, or a list or tuple of str, got 1"),
        ({"specify_prefix": [1]}, TypeError, "specify_prefix: expected str, or a list or tuple of str, got [1]"),
        ({"filter_prefix": ""}, ValueError, "filter_prefix: an empty prefix is that of every name"),
        ({"choice_func": lambda name: "x"}, TypeError,
         "choice_func: it said 'x' to layer.b; True or False is expected"),
        ({"specify_prefix": "x"}, ValueError,
         "{folder}: no tensor of 4 is left by filter_prefix, specify_prefix and choice_func"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(folder: Path, given: dict[str, Any], kind: type[Exception], text: str) -> None:
    assert refusal(lambda: load_segmented_checkpoints(str(folder), **given), kind) == text.format(folder=folder)


def test_a_folder_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    load: Any = load_segmented_checkpoints
    assert refusal(lambda: load(folder), TypeError) == f"ckpt_file_dir: expected str, got {type(folder).__name__}"
    assert refusal(lambda: load(str(folder / "x"))) == f"ckpt_file_dir: {folder / 'x'} is not a folder"
    (folder / "x").mkdir()
    assert (
        refusal(lambda: load(str(folder / "x"))) == f"ckpt_file_dir: {folder / 'x'} has no .safetensors or .ckpt file"
    )
    (folder / "x" / "a.ckpt").touch()
    text = f"{folder / 'x' / 'a.ckpt'}: not a MindSpore checkpoint: it is empty"
    assert refusal(lambda: load(str(folder / "x"))) == text
    (folder / "x" / "b.safetensors").touch()
    text = f"{folder / 'x' / 'a.ckpt'} and b.safetensors: two formats in one folder; leave files of one"
    assert refusal(lambda: load(str(folder / "x"))) == text
    write_file(folder / "c.safetensors", {"layer.w": Blob.of("int8", (), b"x")}, {})
    text = f"{folder / 'c.safetensors'}: layer.w is in a.safetensors too; one file of each tensor can count"
    assert refusal(lambda: load(str(folder))) == text


@pytest.mark.parametrize(("mode", "size"), [("AES-GCM", 32), ("AES-CBC", 16), ("SM4-CBC", 16)])
def test_encrypted_files_open_with_their_key(tmp_path: Path, mode: str, size: int) -> None:
    shutil.copy(FORMATS / f"enc_{mode}_{size * 8 if mode == 'AES-GCM' else 128}.ckpt", tmp_path / "a.ckpt")
    found = load_segmented_checkpoints(str(tmp_path), dec_key=bytes(range(size)), dec_mode=mode)
    plain = open_ckpt(FORMATS / "dtypes.ckpt")
    assert {name: bytes(blob.data) for name, blob in found.items()} == {name: bytes(plain.read(name)) for name in found}
    load: Any = load_segmented_checkpoints
    assert "encrypted: load_segmented_checkpoints opens it, with dec_key" in refusal(lambda: load(str(tmp_path)))


def test_strings_saved_among_tensors_are_kept_apart(tmp_path: Path) -> None:
    shutil.copy(FORMATS / "crc_append.ckpt", tmp_path)
    found = load_segmented_checkpoints(str(tmp_path))
    assert found.texts.keys().isdisjoint(found)
    assert found.texts


def test_a_net_takes_what_it_has_a_place_for(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    want = {name: torch.randn(t.shape).to(t.dtype) for name, t in net.state_dict().items()}
    blobs = {name: Blob.of("bfloat16", tuple(t.shape), t.view(torch.uint8).numpy()) for name, t in want.items()}
    write_file(tmp_path / "a.safetensors", {**blobs, "other": Blob.of("int8", (), b"x")}, {})
    load_segmented_checkpoints(str(tmp_path), net)
    assert all(torch.equal(net.state_dict()[name], t) for name, t in want.items())
    load: Any = load_segmented_checkpoints
    text = "the checkpoint does not fit the net:\n  only in the files: other"
    assert refusal(lambda: load(str(tmp_path), net, strict_load=True)) == text
    wide = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    text = "the checkpoint does not fit the net:\n  weight: the files have bfloat16[2, 3], the net bfloat16[2, 4]"
    assert refusal(lambda: load(str(tmp_path), wide)) == text
    assert refusal(lambda: load(str(tmp_path), torch.nn.ReLU())) == (
        "the checkpoint does not fit the net:\n  no tensor of the files is in the net"
    )
