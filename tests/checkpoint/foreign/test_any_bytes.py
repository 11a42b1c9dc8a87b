"""Any bytes give a value or a ``ValueError`` and nothing else, and no code in them runs."""

from __future__ import annotations

import pickle
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint.foreign import torch_dcp
from launcher.checkpoint.foreign.torch_dcp import read, read_dcp


@cache
def real() -> dict[str, bytes]:
    """The files of a folder as torch writes it."""
    with TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is only one process
        dcp.save({"w": torch.ones(3, 4), "step": 1}, checkpoint_id=Path(made) / "d", no_dist=True)
        return {path.name: path.read_bytes() for path in (Path(made) / "d").iterdir()}


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    for known in (torch_dcp.KNOWN_METADATA, torch_dcp.KNOWN):
        try:
            read(data, known)
        except ValueError:
            continue


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=8))
def test_plain_data_comes_back(value: object) -> None:
    for protocol in (2, 4, 5):
        assert read(pickle.dumps(value, protocol), {}) == value


@given(st.data())
@settings(deadline=None)
def test_a_folder_with_some_bytes_changed_is_read_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(real())))
    raw = bytearray(real()[name])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    with TemporaryDirectory() as made:
        for file, content in {**real(), name: bytes(raw)}.items():
            (Path(made) / file).write_bytes(content)
        with suppress(ValueError):
            folder = read_dcp(Path(made))
            for tensor in folder.specs:
                assert sum(map(len, folder.chunks(tensor))) == folder.specs[tensor].nbytes
