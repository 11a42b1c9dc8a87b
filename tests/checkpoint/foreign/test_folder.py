from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from launcher.checkpoint.foreign.torch_dcp import KNOWN_METADATA, Record, read, read_dcp
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.runtime.cluster.world import World
from launcher.runtime.training.checkpoint_tensors import blob
from launcher.untrusted.pickles import RefusedPickle
from tests.checkpoint.refusal import refusal
from tests.ranks import on_ranks

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]  # fmt: skip


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is only one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def same(folder: Path, expected: dict[str, Tensor]) -> None:
    found = read_dcp(folder)
    assert found.specs.keys() == expected.keys()
    for name, tensor in expected.items():
        want = blob(tensor)
        data = b"".join(map(bytes, found.chunks(name)))
        assert Blob.of(found.specs[name].dtype, found.specs[name].shape, data) == want, name


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    raw = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return raw.to(torch.uint8).bool() if dtype == torch.bool else raw.to(dtype)


def test_every_dtype_comes_back_as_its_bytes(tmp_path: Path) -> None:
    state = {str(d).removeprefix("torch."): numbers(d, 3, 4) for d in DTYPES}
    same(saved(tmp_path / "d", dict(state)), state)


def test_tensors_of_any_shape_and_stride_and_nested_names(tmp_path: Path) -> None:
    state = {"number": torch.tensor(3.5), "empty": torch.empty(0, 3), "turned": numbers(torch.float32, 3, 4).t(),
             "part": numbers(torch.float32, 6, 4)[1:4, ::2]}  # fmt: skip
    folder = saved(tmp_path / "d", {"model": dict(state), "step": 5, "name": "x"})
    same(folder, {f"model.{name}": t for name, t in state.items()})
    assert set(read_dcp(folder).others) == {"step", "name"}


def sharded(world: World, folder: Path) -> None:
    flat = init_device_mesh("cpu", (world.size,), mesh_dim_names=("x",))
    state = {"rows": distribute_tensor(numbers(torch.float32, 7, 3), flat, [Shard(0)]),
             "columns": distribute_tensor(numbers(torch.bfloat16, 4, 9), flat, [Shard(1)]),
             "copied": distribute_tensor(numbers(torch.int64, 5), flat, [Replicate()])}  # fmt: skip
    if world.size == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        state["both"] = distribute_tensor(numbers(torch.float32, 6, 10), grid, [Shard(0), Shard(1)])
        state["twice"] = distribute_tensor(numbers(torch.float32, 9, 2), grid, [Shard(0), Shard(0)])
    dcp.save(state, checkpoint_id=folder)


@pytest.mark.parametrize("size", [2, 4])
def test_the_shards_of_several_ranks_are_put_together(tmp_path: Path, size: int) -> None:
    on_ranks(size, lambda world: sharded(world, tmp_path / "d"))
    expected = {"rows": numbers(torch.float32, 7, 3), "columns": numbers(torch.bfloat16, 4, 9),
                "copied": numbers(torch.int64, 5)}  # fmt: skip
    if size == 4:
        expected |= {"both": numbers(torch.float32, 6, 10), "twice": numbers(torch.float32, 9, 2)}
    same(tmp_path / "d", expected)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_function_that_a_metadata_pickle_calls_is_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", {"w": torch.ones(3)})
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "harm")))
    text = f"{path}: it uses posix.mkdir, which is not on the list of harmless names"
    assert refusal(lambda: read_dcp(folder)) == text
    assert not (tmp_path / "harm").exists()


def test_a_function_that_the_pickle_of_a_tensor_calls_is_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", {"w": torch.ones(3)})
    file = next(folder.glob("*.distcp"))
    raw = file.read_bytes()
    assert raw.count(b"torch._utils\n_rebuild_tensor_v2") == 1
    file.write_bytes(raw.replace(b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_tensor_v9"))
    text = f"{file}: tensor w: not what torch.save writes: Bad CRC-32 for file 'archive/data.pkl'"
    assert refusal(lambda: read_dcp(folder)) == text
    text = "it uses torch._utils._rebuild_tensor_v9, which is not on the list of harmless names"
    assert refusal(lambda: read(b"ctorch._utils\n_rebuild_tensor_v9\n.", {}), RefusedPickle) == text


BAD = {
    "nothing": b"",
    "no pickle": b"hello",
    "huge memory in advance": b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b".",
    "a lookup by number": b"\x80\x04\x82\x01.",
    "cut short": pickle.dumps(list(range(1000)))[:100],
    "arguments without end": b"\x80\x02" + 2 * b"cm\nRecord\n" + b")\x81Nb\x81.",
    "deep": b"\x80\x04" + b"(" * 5000 + b".",
}


@pytest.mark.parametrize("case", BAD)
def test_a_pickle_of_anything_but_plain_data_is_refused(case: str) -> None:
    assert refusal(lambda: read(BAD[case], {"m.Record": Record})).startswith("not a pickle of plain data (")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", {"w": torch.ones(300)})
    file = next(folder.glob("*.distcp"))
    os.truncate(file, 1000)
    text = refusal(lambda: read_dcp(folder))
    assert text.startswith(f"{file}: tensor w: truncated: it should be in bytes 0 to ")
    assert text.endswith(", the file has 1000")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", {"w": torch.ones(3)})
    file = next(folder.glob("*.distcp"))
    file.unlink()
    assert refusal(lambda: read_dcp(folder)) == f"{file}: no such file; tensor w should be in it"


def test_files_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", {"w": torch.ones(3)}), saved(tmp_path / "b", {"w": torch.ones(3, dtype=torch.int32)})
    shutil.copy(b / "__0_0.distcp", a / "__0_0.distcp")
    text = f"{a / '__0_0.distcp'}: tensor w: its piece at [0] is int32[3], .metadata says float32[3]"
    assert refusal(lambda: read_dcp(a)) == text


class _AsOlderPythonsDo:
    """An enumeration member, as Python 3.11.0 to 3.11.3 pickles it."""

    def __reduce__(self) -> Any:
        return getattr, (torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


def test_enumeration_members_that_python_3_11_2_pickled_are_read() -> None:
    found = read(pickle.dumps(_AsOlderPythonsDo()), KNOWN_METADATA)
    assert isinstance(found, Record)
    assert found.args == (Record, "TORCH_CONTIGUOUS_FORMAT")
