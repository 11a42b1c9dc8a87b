from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import xxhash
from safetensors import safe_open

from launcher.checkpoint.tensorfile.safetensors import CODES, Blob, FileWriter, blob_at, mapped, read_header
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.tensor_spec import TensorSpec
from tests.checkpoint.saving import write_file


def test_every_dtype_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    blobs = {dtype: Blob.of(dtype, (2, 3), bytes(range(6 * n))) for dtype, n in ITEMSIZE.items()}
    blobs |= {"scalar": Blob.of("float32", (), b"abcd"), "none": Blob.of("bfloat16", (0, 4), b"")}
    digests = write_file(path, blobs, {"a": "b"})
    header = read_header(path)
    data = mapped(path)
    assert {name: blob_at(data, header, name) for name in header.entries} == blobs
    assert digests == {name: xxhash.xxh3_128_hexdigest(blob.data) for name, blob in blobs.items()}
    assert header.metadata == {"a": "b"}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays: dict[str, npt.NDArray[Any]] = {
        "b": np.arange(6, dtype="f4").reshape(2, 3),
        "a": np.array(3.0),
        "c": np.zeros((0, 2), "i8"),
    }
    write_file(path, {n: Blob.of(a.dtype.name, a.shape, a) for n, a in arrays.items()}, {"k": "v"})
    got = safetensors.numpy.load_file(path)
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)


def test_the_library_knows_every_dtype_code(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {dtype: Blob.of(dtype, (2,), bytes(2 * n)) for dtype, n in ITEMSIZE.items()}, {"k": "v"})
    with safe_open(path, framework="numpy") as file:
        assert {name: file.get_slice(name).get_dtype() for name in file.keys()} == CODES  # noqa: SIM118
        assert file.metadata() == {"k": "v"}


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {}, {"k": "v"})
    assert read_header(tmp_path / "a.safetensors").entries == {}
    assert safetensors.numpy.load_file(tmp_path / "a.safetensors") == {}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    arrays = {"x": np.arange(5, dtype="i4"), "y": np.array(True), "z": np.arange(6, dtype="f2").reshape(3, 2)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", {"format": "np"})
    header = read_header(tmp_path / "a.safetensors")
    data = mapped(tmp_path / "a.safetensors")
    for name, array in arrays.items():
        assert blob_at(data, header, name) == Blob.of(array.dtype.name, array.shape, array)
    assert header.metadata == {"format": "np"}


def test_tensors_are_aligned_and_in_one_order_however_they_were_given(tmp_path: Path) -> None:
    specs = {"b": TensorSpec((3,), "bool"), "a": TensorSpec((1,), "float16"), "é": TensorSpec((1,), "int64")}
    blobs = {name: Blob.of(s.dtype, s.shape, bytes(s.nbytes)) for name, s in specs.items()}
    write_file(tmp_path / "a", blobs, {})
    write_file(tmp_path / "b", dict(reversed(blobs.items())), {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    slots = read_header(tmp_path / "a").entries
    assert list(slots) == ["é", "a", "b"]
    assert all(slot.start % ITEMSIZE[slot.spec.dtype] == 0 for slot in slots.values())


def test_pieces_may_be_written_in_any_order(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a", {"x": TensorSpec((4,), "uint8"), "y": TensorSpec((2,), "uint8")}, {}) as file:
        x, y = (file.header.entries[name].start for name in "xy")
        file.write(y, memoryview(b"YZ"))
        file.write(x + 2, memoryview(b"cd"))
        file.write(x, memoryview(b"ab"))
    assert (tmp_path / "a").read_bytes().endswith(b"abcdYZ")
