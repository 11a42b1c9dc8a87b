"""Files of nanoGPT, llm.c and Megatron, made as their formats are published."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.file_kinds import BadFile
from launcher.data.tokens import megatron as reader
from launcher.data.tokens.formats import check_digest, mapped, token_file
from tests.data.token_bytes import little, llm_c, megatron, own

LETTERS = {"uint16": "H", "uint32": "I"}
READ = ".tokens, .bin (nanoGPT, llm.c) and .bin with .idx (Megatron) are read"
shorts = st.integers(0, 65535)


def refused(path, dtype="uint16") -> str:
    with pytest.raises(BadFile) as caught:
        token_file(path, dtype)
    return str(caught.value)


@pytest.mark.parametrize("dtype", LETTERS)
@given(tokens=st.lists(shorts, min_size=1, max_size=30))
def test_nanogpt_files_are_tokens_alone(tmp_path_factory, dtype, tokens):
    path = tmp_path_factory.mktemp("nanogpt") / "train.bin"
    path.write_bytes(little(LETTERS[dtype], tokens))
    read = token_file(path, dtype)
    check_digest(read)  # the file has none
    assert mapped(read).tolist() == tokens
    assert read.vocab_size is None


@pytest.mark.parametrize(("magic", "version", "letter"), [(20240520, 1, "H"), (20240801, 7, "I")])
@given(tokens=st.lists(shorts, min_size=1, max_size=30))
def test_llm_c_files_have_a_header_of_256_numbers(tmp_path_factory, magic, version, letter, tokens):
    path = tmp_path_factory.mktemp("llmc") / "train.bin"
    path.write_bytes(llm_c(tokens, magic=magic, version=version, letter=letter))
    assert mapped(token_file(path, "uint16")).tolist() == tokens


@pytest.mark.parametrize(
    ("written", "read", "way"),
    [
        ("uint32", "uint16", "data.dtype=uint32 reads them"),
        ("int64", "uint16", "write them as uint16 or uint32"),
        ("int64", "uint32", "write them as uint16 or uint32"),
    ],
)
@pytest.mark.parametrize("vocab_size", [256, 128_256])
def test_tokens_that_are_wider_than_they_are_read_are_refused(tmp_path, written, read, way, vocab_size):
    path = tmp_path / "train.bin"
    np.random.default_rng(0).integers(0, vocab_size, 500).astype(written).tofile(path)
    with pytest.raises(BadFile) as error:
        token_file(path, read)
    assert str(error.value) == f"its tokens are {written}: read as data.dtype={read}, every second one is near 0; {way}"


@pytest.mark.parametrize("tokens", [[7] * 500, [0, 1, 2, 3] * 100, [*range(500)]], ids=["one", "few", "many"])
def test_tokens_of_the_width_that_is_read_are_read(tmp_path, tokens):
    path = tmp_path / "train.bin"
    np.array(tokens, np.uint16).tofile(path)
    assert mapped(token_file(path, "uint16")).tolist() == tokens


BAD_BIN = {
    "empty": (b"", "the file is empty"),
    "odd": (b"abc", "3 bytes are not a whole number of tokens of data.dtype=uint16"),
    "version": (llm_c([1], version=2), "version 2 of llm.c files with 20240520; this launcher reads version 1"),
    "header": (llm_c([])[:1023], "cut off inside its header of 1024 bytes"),
    "short": (
        llm_c([1, 2])[:-1], "its header promises 2 tokens of uint16, 1028 bytes in all; it has 1027"
    ),
    "long": (llm_c([1, 2], count=1), "its header promises 1 tokens of uint16, 1026 bytes in all; it has 1028"),
    "negative": (llm_c([], count=-1), "its header promises -1 tokens of uint16, 1022 bytes in all; it has 1024"),
    "zip": (b"PK\x03\x04" + bytes(100), f"zip by its first bytes, not tokens alone: {READ}"),
    "numpy": (b"\x93NUMPY" + bytes(100), f"NumPy by its first bytes, not tokens alone: {READ}"),
    "index": (b"MMIDIDX\x00\x00" + bytes(99), f"tokens by its first bytes, not tokens alone: {READ}"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "why"), BAD_BIN.values(), ids=BAD_BIN)
def test_a_bad_bin_file_says_why(tmp_path, data, why):
    path = tmp_path / "train.bin"
    path.write_bytes(data)
    assert refused(path) == why


def test_two_bytes_of_gzip_are_a_token_like_any_other(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"\x1f\x8b\x08\x00")
    assert mapped(token_file(path, "uint16")).tolist() == [0x8B1F, 8]


def test_a_file_of_another_name_is_not_taken_for_tokens(tmp_path):
    path = tmp_path / "train.dat"
    path.write_bytes(bytes(100))
    assert refused(path) == f"not a file of tokens by its name: {READ}"


@pytest.mark.parametrize("letter", ["B", "b", "h", "i", "q", "H"])
@given(st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=6))
def test_megatron_files_are_their_sequences_one_after_the_other(tmp_path_factory, letter, sequences):
    if not any(sequences):
        sequences = [[5]]
    path = megatron(tmp_path_factory.mktemp("megatron") / "c.bin", sequences, letter=letter)
    assert mapped(token_file(path, "uint16")).tolist() == [*chain(*sequences)]


def test_an_index_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK", 3)
    sequences = np.split(np.arange(100), range(1, 100, 9))
    path = megatron(tmp_path / "c.bin", [s.tolist() for s in sequences])
    assert mapped(token_file(path, "uint16")).tolist() == list(range(100))
    starts = [2 * sum(map(len, sequences[:k])) for k in range(len(sequences))]
    megatron(path, [s.tolist() for s in sequences], pointers=[*starts[:7], starts[7] - 2, *starts[8:]])
    assert refused(path) == (
        f"sequence 7 of its .idx starts at byte {starts[7] - 2}, the one before it ends at byte {starts[7]}: "
        "sequences must be in order and without gaps"
    )


TWO = [[1, 2, 3], [4, 5]]
SIZE = 34 + 2 * 12 + 3 * 8
OUTSIDE = "is outside the file, which has 10 bytes"
BAD_INDEX = {
    "magic": ({"magic": b"MMIDIDX\x00\x01"}, "its .idx is not an index of Megatron: its first bytes differ"),
    "version": ({"version": 2}, "its .idx has version 2; this launcher reads version 1"),
    "float": ({"code": 7}, "its .idx says dtype 7 (float32), which tokens cannot have"),
    "dtype": ({"code": 9}, "its .idx says dtype 9 (not known), which tokens cannot have"),
    "other dtype": ({"code": 4}, f"sequence 0 of its .idx, 12 bytes from byte 0 on, {OUTSIDE}"),
    "size": ({"sizes": [3, 3]}, f"sequence 1 of its .idx, 6 bytes from byte 6 on, {OUTSIDE}"),
    "negative size": ({"sizes": [3, -1]}, f"sequence 1 of its .idx, -2 bytes from byte 6 on, {OUTSIDE}"),
    "pointer": ({"pointers": [0, 1 << 62]}, f"sequence 1 of its .idx, 4 bytes from byte {1 << 62} on, {OUTSIDE}"),
    "largest": (
        {"pointers": [0, (1 << 63) - 1]}, f"sequence 1 of its .idx, 4 bytes from byte {(1 << 63) - 1} on, {OUTSIDE}"
    ),
    "negative pointer": ({"pointers": [-2, 6]}, f"sequence 0 of its .idx, 6 bytes from byte -2 on, {OUTSIDE}"),
    "gap": (
        {"sizes": [2, 2]},
        "sequence 1 of its .idx starts at byte 6, the one before it ends at byte 4: "
        "sequences must be in order and without gaps",
    ),
    "order": (
        {"sizes": [2, 3], "pointers": [6, 0]},
        "sequence 0 of its .idx starts at byte 6, the one before it ends at byte 0: "
        "sequences must be in order and without gaps",
    ),
    "less": ({"sizes": [3, 1]}, "it has 10 bytes, but its .idx says 8"),
    "first document": ({"documents": [1, 1, 2]}, "the first document of its .idx starts at sequence 1, not 0"),
    "document back": (
        {"documents": [0, 2, 1]}, "the documents of its .idx are out of order, or exceed its 2 sequences"
    ),
    "document outside": (
        {"documents": [0, 1, 3]}, "the documents of its .idx are out of order, or exceed its 2 sequences"
    ),
    "last document": ({"documents": [0, 1, 1]}, "the last document of its .idx ends at sequence 1 of 2"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "why"), BAD_INDEX.values(), ids=BAD_INDEX)
def test_a_bad_index_says_why(tmp_path, changes, why):
    assert refused(megatron(tmp_path / "c.bin", TWO, **changes)) == why


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (20, "its .idx is cut off inside its header"),
        (
            -1,
            f"its .idx should have {SIZE} bytes for 2 sequences and 3 document boundaries, but has {SIZE - 1}",
        ),
    ],
)
def test_an_index_cut_off_says_so(tmp_path, keep, why):
    path = megatron(tmp_path / "c.bin", TWO)
    index = tmp_path / "c.idx"
    index.write_bytes(index.read_bytes()[:keep])
    assert refused(path) == why


def test_an_index_of_nothing_again_and_again_is_not_read_for_hours(tmp_path):
    path = megatron(tmp_path / "c.bin", TWO)
    n = 1 << 38
    (tmp_path / "c.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, 0))
    os.truncate(tmp_path / "c.idx", 34 + 12 * n)
    assert refused(path) == f"its .idx lists {n} sequences, but the .bin file has only 10 bytes"


def test_an_index_that_is_a_folder_or_leads_nowhere_is_not_left_out(tmp_path):
    path = tmp_path / "c.bin"
    path.write_bytes(bytes(10))
    (tmp_path / "c.idx").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        token_file(path, "uint16")


def test_an_index_that_promises_the_most_is_refused_at_once(tmp_path):
    path = megatron(tmp_path / "c.bin", TWO)
    most = (1 << 64) - 1
    (tmp_path / "c.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, most, most))
    assert refused(path) == (
        f"its .idx should have {34 + 20 * most} bytes for {most} sequences and {most} document boundaries, but has 34"
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    """The bytes are tried in each place where a user's file can be."""
    folder = tmp_path_factory.mktemp("any")
    good = megatron(folder / "m.bin", TWO)
    (folder / "m.idx").write_bytes((folder / "m.idx").read_bytes()[: len(data)] + data)
    starts = (own([1])[:60], llm_c([1])[:20], b"")
    for name, start in zip(("a.tokens", "b.bin", "c.bin"), starts, strict=True):
        (folder / name).write_bytes(start + data)
    for path in (good, *(folder / name for name in ("a.tokens", "b.bin", "c.bin"))):
        with suppress(BadFile):
            token_file(path, "uint16")
