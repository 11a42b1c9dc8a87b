from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint import Blob, load_segmented_checkpoints
from launcher.extras.mindspore.ckpt import open_ckpt
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import write_file

FORMATS = Path(__file__).parent / "fixtures" / "formats"


def raw(p: torch.Tensor) -> bytes:
    return bytes(p.detach().reshape(-1).view(torch.uint8).numpy())


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
    assert type(found) is dict
    assert all(type(p) is torch.nn.Parameter and raw(p) == name.encode()[:7].ljust(7) for name, p in found.items())


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"net": object()}, TypeError, "net: expected a torch.nn.Module, got object"),
        ({"dec_key": bytes(16)}, ValueError, "dec_key: {folder}/a.safetensors is not a .ckpt file; leave out dec_key"),
        ({"dec_key": "x"}, TypeError, "dec_key: expected bytes, got str"),
        ({"dec_mode": "ROT13"}, ValueError,
         "dec_mode: 'ROT13' is not known; give one of AES-GCM, AES-CBC, SM4-CBC"),
        ({"filter_prefix": 1}, TypeError, "filter_prefix: expected str, or a list or tuple of str, got 1"),
        ({"specify_prefix": [1]}, TypeError, "specify_prefix: expected str, or a list or tuple of str, got [1]"),
        ({"filter_prefix": ""}, ValueError, "filter_prefix: an empty prefix matches every name"),
        ({"choice_func": lambda name: "x"}, TypeError,
         "choice_func: it returned 'x' for layer.b; expected True or False"),
        ({"specify_prefix": "x"}, ValueError,
         "{folder}: filter_prefix, specify_prefix and choice_func leave none of 4 tensors"),
    ],
)  # fmt: skip
def test_invalid_arguments_of_load_segmented_checkpoints_are_refused(
    folder: Path, given: dict[str, Any], kind: type[Exception], text: str
) -> None:
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
    text = f"{folder / 'x' / 'a.ckpt'} and b.safetensors: two formats in one folder; keep files of one format"
    assert refusal(lambda: load(str(folder / "x"))) == text
    write_file(folder / "c.safetensors", {"layer.w": Blob.of("int8", (), b"x")}, {})
    text = f"{folder / 'c.safetensors'}: layer.w is in a.safetensors too; only one file may have it"
    assert refusal(lambda: load(str(folder))) == text


@pytest.mark.parametrize(("mode", "size"), [("AES-GCM", 32), ("AES-CBC", 16), ("SM4-CBC", 16)])
def test_encrypted_files_open_with_their_key(tmp_path: Path, mode: str, size: int) -> None:
    shutil.copy(FORMATS / f"enc_{mode}_{size * 8 if mode == 'AES-GCM' else 128}.ckpt", tmp_path / "a.ckpt")
    found = load_segmented_checkpoints(str(tmp_path), dec_key=bytes(range(size)), dec_mode=mode)
    plain = open_ckpt(FORMATS / "dtypes.ckpt")
    assert {name: raw(p) for name, p in found.items()} == {name: bytes(plain.read(name)) for name in found}
    load: Any = load_segmented_checkpoints
    assert "encrypted; read it with load_segmented_checkpoints, dec_key" in refusal(lambda: load(str(tmp_path)))


def test_strings_saved_among_parameters_are_strings_among_them(tmp_path: Path) -> None:
    shutil.copy(FORMATS / "crc_append.ckpt", tmp_path)
    found = load_segmented_checkpoints(str(tmp_path))
    plain = open_ckpt(FORMATS / "crc_append.ckpt")
    strings = {n: plain.text(n) for n, stored in plain.entries.items() if stored.spec.dtype == "str"}
    assert strings
    assert {n: v for n, v in found.items() if isinstance(v, str)} == strings
    assert {n for n, v in found.items() if isinstance(v, torch.nn.Parameter)} == plain.entries.keys() - strings.keys()


def test_a_prefix_that_is_given_makes_the_choice(folder: Path) -> None:
    """As in MindSpore, the older arguments override ``choice_func``, which is not called then."""
    found = load_segmented_checkpoints(str(folder), filter_prefix="adam", choice_func=lambda name: False)
    assert sorted(found) == ["head.w", "layer.b", "layer.w"]
    found = load_segmented_checkpoints(str(folder), specify_prefix=["layer"], choice_func=lambda name: False)
    assert sorted(found) == ["layer.b", "layer.w"]


def test_tensors_that_every_segment_repeats_are_loaded_once(folder: Path) -> None:
    write_file(folder / "c.safetensors", {"layer.w": Blob.of("int8", (7,), b"layer.w"),
                                          "tail.w": Blob.of("int8", (), b"x")}, {})  # fmt: skip
    assert sorted(load_segmented_checkpoints(str(folder))) == ["adam.m", "head.w", "layer.b", "layer.w", "tail.w"]


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir(exist_ok=True)
    blobs = {
        n: Blob.of(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy())
        for n, t in tensors.items()
    }
    write_file(folder / "a.safetensors", blobs, {})
    return str(folder)


def test_names_match_by_their_ends_and_numbers_take_the_width_of_the_net(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).half()
    want = {n: torch.randn(t.shape) if t.is_floating_point() else torch.tensor(5) for n, t in net.state_dict().items()}
    files = {f"backbone.{n}": t if t.is_floating_point() else t.int() for n, t in want.items()}
    files |= {f"moment1.{n}": torch.zeros_like(t) for n, t in files.items()}
    found = load_segmented_checkpoints(saved(tmp_path / "a", files), net)
    assert found.keys() == files.keys()
    for name, t in net.state_dict().items():
        assert torch.equal(t, want[name].to(t.dtype)), name
    net.load_state_dict({n.removeprefix("backbone."): v for n, v in found.items() if n.startswith("backbone.")})


def test_ambiguous_names_and_widths_are_refused(tmp_path: Path) -> None:
    load: Any = load_segmented_checkpoints
    head = "the checkpoint does not fit the net:\n"
    two = saved(
        tmp_path / "two", {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(2, 3), "a.bias": torch.ones(2)}
    )
    net = torch.nn.Linear(3, 2)
    load(two, net)  # the prefix a. has both tensors
    assert net.bias.tolist() == [1, 1]
    both = saved(tmp_path / "both", {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(2, 3)})
    text = f"{head}  weight: ambiguous: a.weight and b.weight"
    assert refusal(lambda: load(both, net)) == text
    large = saved(tmp_path / "large", {"weight": torch.full((2, 3), 1e6)})
    text = f"{head}  weight: it has numbers that float16 cannot represent"
    assert refusal(lambda: load(large, torch.nn.Linear(3, 2).half())) == text
    whole = saved(tmp_path / "whole", {"weight": torch.ones(2, 3, dtype=torch.int32)})
    text = f"{head}  weight: the files have int32[2, 3], the net float32[2, 3]"
    assert refusal(lambda: load(whole, net)) == text
    text = f"{head}  only in the net: bias\n  weight: the files have int32[2, 3], the net float32[2, 3]"
    assert refusal(lambda: load(whole, net, strict_load=True)) == text


def test_a_strict_load_takes_the_files_of_a_training_with_its_counters_and_optimizer_states(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    want = {name: torch.randn(t.shape) for name, t in net.state_dict().items()}
    states = {f"{kind}.{name}": torch.ones(t.shape) for kind in ("moments", "adam_m", "optim.exp_avg")
              for name, t in want.items()}  # fmt: skip
    counters = {"epoch_num": torch.tensor(3), "beta1_power": torch.ones(1), "lr": torch.tensor(0.1)}
    load_segmented_checkpoints(saved(tmp_path / "a", {**want, **states, **counters}), net, strict_load=True)
    assert all(torch.equal(net.state_dict()[name], t) for name, t in want.items())

    # other names are still refused: a state without its parameter, a weight of another model
    other = saved(tmp_path / "b", {**want, "moments.head": torch.ones(4), "head.weight": torch.ones(2, 3)})
    text = "the checkpoint does not fit the net:\n  only in the files: head.weight\n  only in the files: moments.head"
    load: Any = load_segmented_checkpoints
    assert refusal(lambda: load(other, net, strict_load=True)) == text


def test_a_net_takes_what_it_has_a_place_for(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    want = {name: torch.randn(t.shape).to(t.dtype) for name, t in net.state_dict().items()}
    blobs = {name: Blob.of("bfloat16", tuple(t.shape), t.view(torch.uint8).numpy()) for name, t in want.items()}
    write_file(tmp_path / "a.safetensors", {**blobs, "other": Blob.of("int8", (2,), b"xy")}, {})
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
