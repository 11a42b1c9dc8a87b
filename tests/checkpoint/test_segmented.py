from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import Blob, load_segmented_checkpoints
from launcher.checkpoint.files import write_file
from tests.checkpoint.refusal import refusal


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
        ({"net": object()}, ValueError,
         "net, strict_load: not available: this package has no networks; load the mapping that is returned"),
        ({"dec_key": b"x"}, ValueError, "dec_key: encrypted files are not available yet"),
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
    assert refusal(lambda: load(str(folder / "x"))) == f"ckpt_file_dir: {folder / 'x'} has no .safetensors file"
    (folder / "x" / "a.ckpt").touch()
    text = f"{folder / 'x' / 'a.ckpt'}: .ckpt files are not available yet; give a folder of .safetensors files"
    assert refusal(lambda: load(str(folder / "x"))) == text
    write_file(folder / "c.safetensors", {"layer.w": Blob.of("int8", (), b"x")}, {})
    text = f"{folder / 'c.safetensors'}: layer.w is in a.safetensors too; one file of each tensor can count"
    assert refusal(lambda: load(str(folder))) == text
