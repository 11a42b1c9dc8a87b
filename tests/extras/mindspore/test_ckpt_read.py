from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Blob, read_full
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import words
from launcher.extras.mindspore.ckpt import NAMES, Ckpt, file_bytes, open_ckpt, text_bytes, write_ckpt
from launcher.extras.mindspore.protobuf import encoded, head, numbers, packet
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.mindspore.truth import FIXTURES, exactly

FORMATS = FIXTURES / "formats"


def copy(file: Ckpt, path: Path, **how: object) -> bytes:
    write_ckpt(path, {n: e.spec for n, e in file.entries.items()}, file.chunks, **how)  # type: ignore[arg-type]
    return path.read_bytes()


def entry(name: bytes, dims: tuple[int, ...], kind: bytes, data: bytes) -> bytes:
    return packet(1, packet(1, name) + packet(2, numbers(1, dims) + packet(2, kind) + packet(3, data)))


@pytest.mark.parametrize(
    ("name", "how"), [("dtypes", {}), ("crc_append", {"crc": True}), ("chunked_1KiB", {"part": 1024})]
)
def test_a_file_that_mindspore_wrote_comes_out_byte_for_byte(name: str, how: dict[str, object], tmp_path: Path) -> None:
    path = FORMATS / f"{name}.ckpt"
    assert copy(open_ckpt(path), tmp_path / "again", **how) == path.read_bytes()


RANKS = sorted((FIXTURES / "cases").glob("*/*/rank_*/*.ckpt"))


@pytest.mark.parametrize("path", RANKS, ids=lambda p: "-".join((*p.parts[-4:-3], p.name)))
def test_the_files_of_the_cases_come_out_byte_for_byte(path: Path, tmp_path: Path) -> None:
    assert copy(open_ckpt(path), tmp_path / "again") == path.read_bytes()


def test_every_dtype_is_read_as_the_safetensors_file_has_it() -> None:
    path = FORMATS / "dtypes.ckpt"
    file = open_ckpt(path)
    text = (FORMATS / "dtypes.safetensors").read_bytes()
    length = int.from_bytes(text[:8], "little")
    for name, stored in file.entries.items():
        offsets = re.search(rf'"{name}":\{{[^}}]*"data_offsets":\[(\d+),(\d+)\]', text[8 : 8 + length].decode())
        assert offsets is not None
        start, stop = (8 + length + int(n) for n in offsets.groups())
        assert bytes(file.read(name)) == text[start:stop]
        slot = file.slot(name)
        assert slot is not None
        window = Window()
        out = np.empty(file_bytes(stored.spec), np.uint8)
        if stored.spec.dtype in ITEMSIZE:
            window.copy(path, slot, (...,), words(out, stored.spec))
            assert out.tobytes() == text[start:stop]
    specs = {name.removeprefix("p."): e.spec for name, e in file.entries.items()}
    assert specs.pop("bf16") == TensorSpec((2, 3), "bfloat16")
    assert specs.pop("scalar0d") == TensorSpec((), "float32")
    assert specs.pop("one") == TensorSpec((1,), "int32")
    assert {n: s.dtype for n, s in specs.items()} == {n: n for n in specs}


def test_appended_values_and_strings_are_read() -> None:
    file = open_ckpt(FORMATS / "crc_append.ckpt")
    assert file.text("name") == "héllo"
    assert struct.unpack("<q", file.read("epoch_num")) == (3,)
    assert file.entries["name"].spec == TensorSpec((5,), "str")
    assert file.blob("t") == Blob.of("int32", (3,), np.arange(3, dtype=np.int32).view(np.uint8))


def test_a_tensor_in_parts_is_one_and_any_stretch_of_it_can_be_read() -> None:
    file = open_ckpt(FORMATS / "chunked_1KiB.ckpt")
    with np.load(FORMATS / "chunked_truth.npz") as truth:
        for name, want in truth.items():
            assert file.entries[name].spec == TensorSpec(want.shape, "float32")
            assert bytes(file.read(name)) == want.tobytes()
        assert len(file.entries["big.w"].parts) == 6
        assert file.slot("big.w") is None
        assert bytes(file.read("big.w", 1000, 3100)) == truth["big.w"].tobytes()[1000:3100]
        assert b"".join(file.chunks("big.w")) == truth["big.w"].tobytes()


specs = st.builds(
    TensorSpec, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(sorted(NAMES.keys() - {"str"}))
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8), specs, max_size=5), st.integers(1, 40), st.booleans(), st.text(max_size=5))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, found: dict[str, TensorSpec], part: int, crc: bool, text: str
) -> None:
    found = {n: s for n, s in found.items() if s.shape != (0,) or s.dtype == "bool"} | {
        "a text": TensorSpec((len(text_bytes(text)) // 4,), "str")
    }
    data = {n: bytes(i % 251 for i in range(file_bytes(s))) for n, s in found.items()} | {"a text": text_bytes(text)}
    path = tmp_path_factory.mktemp("w") / "x.ckpt"
    digests = write_ckpt(path, found, lambda n: [data[n][:3], data[n][3:]], crc=crc, part=part)
    file = open_ckpt(path)
    assert {n: e.spec for n, e in file.entries.items()} == found
    assert {n: bytes(file.read(n)) for n in found} == data
    assert file.text("a text") == text
    assert digests.keys() == found.keys()


def test_scalars_of_older_versions_are_scalars_and_empty_tensors_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    path.write_bytes(entry(b"s", (0,), b"Int64", bytes(8)) + entry(b"e", (0,), b"Int64", b""))
    assert {n: e.spec.shape for n, e in open_ckpt(path).entries.items()} == {"s": (), "e": (0,)}


def test_packed_dims_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "packed.ckpt"
    body = packet(1, encoded(2) + encoded(300)) + packet(2, b"Int8") + packet(3, bytes(600))
    path.write_bytes(packet(1, packet(1, b"w") + packet(2, body)))
    assert open_ckpt(path).entries["w"].spec == TensorSpec((2, 300), "int8")


def test_a_huge_sparse_file_is_opened_by_its_headers_alone(tmp_path: Path) -> None:
    path, size, n = tmp_path / "huge.ckpt", 1 << 36, 4
    with path.open("wb") as file:
        for i in range(n):
            content = numbers(1, (size,)) + packet(2, b"Int8")
            tensor = len(content) + len(head(3, size)) + size
            tag = packet(1, f"w{i}".encode())
            file.write(head(1, len(tag) + len(head(2, tensor)) + tensor) + tag + head(2, tensor) + content)
            file.write(head(3, size))
            file.seek(size, 1)
        file.truncate()
    found = open_ckpt(path)
    assert {e.spec for e in found.entries.values()} == {TensorSpec((size,), "int8")}
    assert bytes(found.read("w3", size - 4, size)) == bytes(4)


def test_strings_and_dtypes_that_tensors_cannot_have_here_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(entry(b"q", (2,), b"Int4", b"ab") + entry(b"t", (0,), b"str", b"\xff" * 4))
    file = open_ckpt(path)
    assert bytes(file.read("q")) == b"ab"
    with pytest.raises(ValueError, match=rf"\A{re.escape(str(path))}: tensor q: dtype int4x2 is unknown; "):
        file.blob("q")
    with pytest.raises(ValueError, match=exactly(f"{path}: string t is damaged: not UTF-32")):
        file.text("t")


W = entry(b"w", (2,), b"Int32", bytes(8))
ZEROS = r"\x00" * 8
FIRST = "not a MindSpore checkpoint, or damaged, at byte"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not a MindSpore checkpoint: it is empty"),
        (b"garbage", f"{FIRST} 0: no entry of a tensor starts here"),
        (W + b"x", f"{FIRST} {len(W)}: no entry of a tensor starts here"),
        (W[:-1], "tensor w: truncated: its entry would end at byte 26, but the tensors end at 25"),
        (W[:4], f"{FIRST} 0: the entry does not start with a name"),
        (W + W[:9], "tensor w: truncated: its entry would end at byte 52, but the tensors end at 35"),
        (W + entry(b"v", (), b"Int8", b"1") + W, "tensor w is listed twice"),
        (W + W, "tensor w is truncated or damaged: it has 16 bytes, int32[2] needs 8"),
        (W + entry(b"w", (3,), b"Int32", b""), "tensor w: its parts differ in shape or dtype"),
        (entry(b"w", (-2,), b"Int32", bytes(8)), "tensor w has a negative dim: [-2]"),
        (
            entry(b"w", (1 << 40, 1 << 40), b"Int32", bytes(8)),
            "tensor w is truncated or damaged: it has 8 bytes, int32[1099511627776, 1099511627776] needs "
            "4835703278458516698824704",
        ),
        (
            entry(b"w", (2,), b"Complex64", bytes(16)),
            f"tensor w has dtype Complex64; supported: {', '.join(NAMES.values())}",
        ),
        (entry(b"\xff", (), b"Int8", b"1"), rf"{FIRST} 0: b'\xff' is not a name: not UTF-8"),
        (packet(1, packet(1, b"m") + packet(3, b"")), "tensor m: a map tensor, which is not supported"),
        (packet(1, packet(1, b"m")), "tensor m: the entry is not a name and a tensor"),
        (packet(1, packet(1, b"m") + packet(2, b"")), "tensor m: its dtype or its content is missing"),
        (head(1, 1 << 62) + b"\x12", f"{FIRST} 0: truncated: it ends within the number at byte 11"),
        (head(1, 1 << 62) + W, rf"tensor '\n\x01w\x12\x13\x08\x02\x12\x05Int32\x1a\x08{ZEROS}'...: "
         "truncated: its entry would end at byte {end}, but the tensors end at 36"),
        (head(1, 1 << 62) + packet(1, b"w") + b"12", "tensor w: truncated: its entry would end at byte {end}, "
         "but the tensors end at 15"),
        (W + b"crc_num" + bytes(10), "damaged: its CRC-32 is {crc}, but 00000000 was saved"),
    ],
)  # fmt: skip
def test_damage_is_named(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(data)
    told = told.replace("{end}", str((1 << 62) + 10)).replace("{crc}", f"{zlib.crc32(W):08x}")
    with pytest.raises(ValueError, match=exactly(f"{path}: {told}")):
        open_ckpt(path)


@pytest.mark.parametrize("name", ["dtypes", "crc_append", "chunked_1KiB"])
def test_a_file_cut_anywhere_is_noticed_unless_between_two_tensors(name: str, tmp_path: Path) -> None:
    data = (FORMATS / f"{name}.ckpt").read_bytes()
    whole = open_ckpt(FORMATS / f"{name}.ckpt")
    path = tmp_path / "cut.ckpt"
    ends = {parts[-1][1] for parts in (e.parts for e in whole.entries.values())}
    for size in range(1, len(data), 7):
        path.write_bytes(data[:size])
        if size in ends:
            assert open_ckpt(path).entries.keys() < whole.entries.keys()
        else:
            with pytest.raises(ValueError, match=rf"\A{re.escape(str(path))}: "):
                open_ckpt(path)


def test_a_flipped_bit_is_found_where_there_is_a_checksum(tmp_path: Path) -> None:
    data = bytearray((FORMATS / "crc_append.ckpt").read_bytes())
    data[0x1E] ^= 1
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.ckpt: damaged: its CRC-32 is [0-9a-f]{8}, but 8d7b5493 was saved\Z"):
        open_ckpt(tmp_path / "x.ckpt")
    assert open_ckpt(tmp_path / "x.ckpt", verify=False).entries.keys() > {"p.float32"}


def test_a_file_cut_short_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(entry(b"w", (1 << 20,), b"Int8", bytes(1 << 20)))
    file = open_ckpt(path)
    with path.open("r+b") as cut:
        cut.truncate(1 << 19)
    with pytest.raises(ValueError, match=exactly(f"{path}: truncated while it was read: it ends at byte {1 << 19}")):
        file.read("w")


def test_full_tensors_of_a_case_are_those_of_its_checkpoint() -> None:
    folder = FIXTURES / "cases" / "c03_tp4_to_full"
    file, full = open_ckpt(folder / "expected" / "rank_0" / "out0.ckpt"), read_full(folder / "full.safetensors")
    assert {n: bytes(file.blob(n).data) for n in full} == {n: bytes(b.data) for n, b in full.items()}
