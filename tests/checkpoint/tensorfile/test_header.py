from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint.tensorfile.safetensors import CODES, Blob, read_header
from tests.checkpoint.saving import write_file


def made(path: Path, rows: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def complaint(path: Path) -> str | None:
    try:
        read_header(path)
    except ValueError as error:
        return str(error)
    return None


def row(start: int, stop: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_a_cut_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {"x": Blob.of("float32", (100,), bytes(400))}, {})
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 7)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is below
        read_header(path)
    assert str(caught.value) == f"{path}: truncated: its tensors end at byte {size}, the file has {size - 7}"


BAD: dict[str, tuple[Any, bytes, int | None, str]] = {
    "cut header": ({}, b"", 50, "truncated: its header ends at byte 58, the file has 10"),
    "terabytes": (
        {}, b"", 1 << 42, "not a safetensors file: its header claims 4398046511104 bytes, at most 33554432 are read"
    ),
    "no json": (b"{nope", b"", None, "not a safetensors file: its header is not JSON"),
    "no utf-8": (b"\xff\xfe\xff", b"", None, "not a safetensors file: its header is not JSON"),
    "nested": (b"[" * 100_000, b"", None, "not a safetensors file: its header is not JSON"),
    "list": ([], b"", None, "not a safetensors file: its header is not a mapping"),
    "twice": (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{}}', b"a", None, "x is listed twice"
    ),
    "overlap": (
        {"x": row(0, 2, [2]), "y": row(1, 3, [2])}, b"abc", None,
        "tensor y starts at byte 129, the one before it ends at 130",
    ),
    "gap": (
        {"x": row(0, 2, [2]), "y": row(3, 5, [2])}, b"abcde", None,
        "tensor y starts at byte 131, the one before it ends at 130",
    ),
    "rest": ({"x": row(0, 2, [2])}, b"abc", None, "1 bytes follow the last tensor, which ends at byte 70"),
    "backwards": ({"x": row(2, 0, [2])}, b"ab", None, "tensor x takes -2 bytes, uint8[2] needs 2"),
    "wrong size": ({"x": row(0, 2, [3])}, b"ab", None, "tensor x takes 2 bytes, uint8[3] needs 3"),
    "negative": ({"x": row(0, 1, [-1])}, b"a", None, "tensor x has shape [-1] at [0, 1]"),
    "float shape": ({"x": row(0, 1, [1.0])}, b"a", None, "tensor x has shape [1.0] at [0, 1]"),  # type: ignore[list-item]
    "dtype": (
        {"x": row(0, 1, [1], "U7")}, b"a", None, f"tensor x has dtype U7; supported: {', '.join(CODES.values())}"
    ),
    "field": ({"x": {"dtype": "U8"}}, b"", None, "tensor x needs dtype, shape and data_offsets"),
    "nan metadata": ({"__metadata__": {"a": float("nan")}}, b"", None, "__metadata__ is not a mapping of text to text"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "data", "length", "text"), BAD.values(), ids=BAD.keys())
def test_a_bad_header_is_refused(tmp_path: Path, rows: Any, data: bytes, length: int | None, text: str) -> None:
    path = made(tmp_path / "bad.safetensors", rows, data, length)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_header(path)
    assert str(caught.value) == f"{path}: {text}"


def test_a_file_of_a_few_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_header(tmp_path / "a")
    text = "truncated: a safetensors file has at least 8 bytes, this one 3"
    assert str(caught.value) == f"{tmp_path / 'a'}: {text}"


def test_a_header_that_claims_terabytes_takes_no_memory(tmp_path: Path) -> None:
    path = made(tmp_path / "bad.safetensors", {}, b"", 1 << 42)
    tracemalloc.start()
    with pytest.raises(ValueError, match="claims 4398046511104 bytes"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_change_of_a_file_is_read_or_refused_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    write_file(path, {"x": Blob.of("float32", (2, 3), bytes(24)), "y": Blob.of("bool", (), b"a")}, {"k": "v"})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    path.write_bytes(raw)
    text = complaint(path)
    assert text is None or text.startswith(f"{path}: ")


def test_metadata_cannot_be_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^__metadata__ cannot be the name of a tensor in a safetensors file$"):
        write_file(tmp_path / "a", {"__metadata__": Blob.of("bool", (), b"a")}, {})
