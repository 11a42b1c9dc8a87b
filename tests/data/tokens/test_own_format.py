""".tokens files: their bytes, a round trip, and what is refused."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.file_kinds import BadFile
from launcher.data.tokens.formats import WRITE_CHUNK, TokenWriter, check_digest, mapped, token_file
from launcher.data.tokens.token_file import TokenFile
from tests.data.token_bytes import own

GOLDEN = bytes.fromhex(
    "89544f4b454e530a" "01000000" "02000000" "0300000000000000" "51c4000000000000" "50c4000000000000"
)  # fmt: skip
DIGESTS = "c1d0df95b6ffdbd516612611f0d1d9ca4d707920a41ba70d"


def written(path: Path, vocab_size: int, *parts, end=None) -> bytes:
    with TokenWriter(path, vocab_size, end) as file:
        for part in parts:
            file.append(part)
    return path.read_bytes()


def test_the_bytes_of_a_file_are_these(tmp_path):
    data = written(tmp_path / "a.tokens", 50257, [15496, 995], [50256], end=50256)
    assert data[:40] == GOLDEN
    assert data[40:64].hex() == DIGESTS
    assert data[64:] == b"\x88\x3c\xe3\x03\x50\xc4"
    assert data == own([15496, 995, 50256], 50257, end=50256)


@pytest.mark.parametrize(("vocab_size", "width", "letter"), [(1 << 16, 2, "H"), ((1 << 16) + 1, 4, "I")])
def test_tokens_are_as_wide_as_the_vocabulary_needs(tmp_path, vocab_size, width, letter):
    last = vocab_size - 1
    data = written(tmp_path / "a.tokens", vocab_size, [0, last])
    assert data == own([0, last], vocab_size, width=width, letter=letter)


@given(st.lists(st.lists(st.integers(0, 99_999), max_size=20), max_size=5), st.sampled_from([1 << 16, 100_000]))
def test_there_and_back_are_the_same_tokens(tmp_path_factory, parts, vocab_size):
    parts = [[t % vocab_size for t in part] for part in parts]
    path = tmp_path_factory.mktemp("there") / "a.tokens"
    written(path, vocab_size, *parts)
    read = token_file(path, "uint16")
    assert (read.vocab_size, read.tokens) == (vocab_size, sum(map(len, parts)))
    check_digest(read)
    if read.tokens:
        assert mapped(read).tolist() == [*chain(*parts)]


def test_a_long_array_is_written_piece_by_piece(tmp_path):
    tokens = np.arange(2 * WRITE_CHUNK + 5) % 1000
    written(tmp_path / "a.tokens", 1000, tokens)
    read = token_file(tmp_path / "a.tokens", "uint16")
    check_digest(read)
    assert np.array_equal(mapped(read), tokens)


def test_a_file_that_is_not_finished_has_no_name(tmp_path):
    def write():
        with TokenWriter(tmp_path / "a.tokens", 9) as file:
            file.append([1])
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert os.listdir(tmp_path) == []


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    old = written(tmp_path / "a.tokens", 9, [1, 2])
    with TokenWriter(tmp_path / "a.tokens", 9) as file:
        file.append([3])
        assert (tmp_path / "a.tokens").read_bytes() == old
    assert os.listdir(tmp_path) == ["a.tokens"]
    assert mapped(token_file(tmp_path / "a.tokens", "uint16")).tolist() == [3]


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([1, 9], "{path}: token 2 is 9, which is not between 0 and 8"),
        ([-1], "{path}: token 1 is -1, which is not between 0 and 8"),
        ([0.5], "tokens must be whole numbers in one row, not float64 [1]"),
        ([[1]], "tokens must be whole numbers in one row, not int64 [1, 1]"),
    ],
    ids=["too large", "negative", "float", "rows"],
)
def test_values_that_are_not_tokens_are_not_written(tmp_path, tokens, why):
    path = tmp_path / "a.tokens"
    with TokenWriter(path, 9) as file:
        file.append([7])
        with pytest.raises(ValueError, match="token") as refused:
            file.append(tokens)
    assert str(refused.value) == why.format(path=path)
    assert mapped(token_file(path, "uint16")).tolist() == [7]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ((0, None), "vocab_size=0 is not between 1 and 4294967296"),
        ((1 << 33, None), "vocab_size=8589934592 is not between 1 and 4294967296"),
        ((9, 9), "end_of_document=9 is not below vocab_size=9"),
    ],
)
def test_a_writer_with_invalid_settings_makes_no_file(tmp_path, settings, why):
    with pytest.raises(ValueError, match="vocab_size") as refused:
        TokenWriter(tmp_path / "a.tokens", *settings)
    assert str(refused.value) == why
    assert os.listdir(tmp_path) == []


GOOD = own([1, 2, 3])
BAD = {
    "empty": (b"", "the file is empty"),
    "magic": (b"x" + GOOD[1:], "not a .tokens file: its first bytes differ"),
    "header cut off": (GOOD[:63], "cut off inside its header of 64 bytes"),
    "version": (own([1, 2, 3], version=2), "version 2 of .tokens files; this launcher reads version 1"),
    "header damaged": (GOOD[:16] + b"\x02" + GOOD[17:], "its header is damaged: its digest does not match"),
    "width": (own([1], width=3), "tokens of 3 bytes; only 2 and 4 are possible"),
    "no vocabulary": (own([1], 0), "vocab_size 0 does not fit tokens of 2 bytes"),
    "large vocabulary": (own([1], 65537), "vocab_size 65537 does not fit tokens of 2 bytes"),
    "end": (own([1], 9, end=9), "token 9 ends documents, but vocab_size is 9"),
    "other end": (own([1], 9, end=-2), "token -2 ends documents, but vocab_size is 9"),
    "cut off": (GOOD[:-1], "cut off: its header promises 3 tokens, 70 bytes with the header; it has 69"),
    "too long": (GOOD + b"\0", "too long: its header promises 3 tokens, 70 bytes with the header; it has 71"),
    "terabytes": (
        own([1], count=1 << 60),
        f"cut off: its header promises {1 << 60} tokens, {(1 << 61) + 64} bytes with the header; it has 66",
    ),
}


@pytest.mark.parametrize(("data", "why"), BAD.values(), ids=BAD)
def test_a_bad_file_says_why(tmp_path, data, why):
    path = tmp_path / "a.tokens"
    path.write_bytes(data)
    with pytest.raises(BadFile) as refused:
        token_file(path, "uint16")
    assert str(refused.value) == why


def test_our_file_is_known_by_its_start_whatever_its_name(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(GOOD)
    digest = GOOD[40:56].hex()
    assert token_file(path, "uint16") == TokenFile(path, "uint16", 64, 3, vocab_size=300, digest=digest)


@pytest.mark.parametrize("at", range(64, 70))
def test_a_changed_byte_of_tokens_is_found_by_the_digest(tmp_path, at):
    path = tmp_path / "a.tokens"
    path.write_bytes(GOOD[:at] + bytes([GOOD[at] ^ 64]) + GOOD[at + 1 :])
    with pytest.raises(BadFile) as refused:
        check_digest(token_file(path, "uint16"))
    assert str(refused.value) == "damaged: the digest of its tokens does not match its header"
