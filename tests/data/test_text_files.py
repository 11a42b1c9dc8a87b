"""Problems with a tokenizer file, and files that are not text."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os

import pytest

from launcher.data import text_tokenizer, train_byte_pairs
from launcher.data.text_file_checks import check_absent, check_text
from launcher.job.schema.data import Text


def test_a_tokenizer_file_that_does_not_fit_says_so(tmp_path):
    def said(path, vocab_size):
        settings = Text(
            name="text", tokenizer="file", tokenizer_file=str(path), vocab_size=vocab_size, seq_len=32, val_fraction=0
        )
        [problem] = [*check_text(settings), *check_absent(settings)]
        return str(problem.key), problem.text, problem.cure

    train_byte_pairs.train("to be or not to be\n" * 50, 270).save(str(tmp_path / "tokenizer.json"))
    assert said(tmp_path / "no.json", 300) == ("data.tokenizer_file", f"{tmp_path / 'no.json'}: no such file", "")
    assert said(tmp_path / "tokenizer.json", 256) == (
        "data.vocab_size",
        f"256: {tmp_path / 'tokenizer.json'} has 265 tokens",
        "data.vocab_size=265",
    )
    assert said(tmp_path, 300) == (
        "data.tokenizer_file",
        f"{tmp_path}: this is a folder; give a file",
        f"data.tokenizer_file={tmp_path / 'tokenizer.json'}",
    )
    with pytest.raises(ValueError, match=f"{tmp_path}: this is a folder; give the file {tmp_path}/tokenizer.json"):
        text_tokenizer.load(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    key, text, cure = said(tmp_path / "bad.json", 300)
    assert (key, cure) == ("data.tokenizer_file", "")
    assert text.startswith(f"{tmp_path / 'bad.json'}: not a tokenizer: ")


def text(path, **changes):
    return Text(name="text", path=str(path), seq_len=8, **changes)


PREPARE = "steps=[prepare] steps.prepare.src={path} converts it to tokens, which data=tokens reads"
RENAME = "give it the suffix of its format, and steps=[prepare] tokenizes it"
OTHER = "data=tokens reads prepared tokens, as .tokens or .bin"
TOKENS = "data=tokens data.path={path} reads it"
NAMES = {
    ".gz": ("gzip", PREPARE),
    ".zst": ("Zstandard", PREPARE),
    ".ZIP": ("zip", "unpack it first"),
    ".jsonl": ("JSON lines", PREPARE),
    ".json": ("JSON", PREPARE),
    ".parquet": ("Parquet", PREPARE),
    ".arrow": ("Arrow", PREPARE),
    ".npy": ("NumPy", OTHER),
    ".tokens": ("tokens", TOKENS),
    ".bin": ("tokens", TOKENS),
    ".idx": ("tokens", TOKENS),
}
STARTS = {
    "gzip": (gzip.compress(b"x" * 99), "gzip", RENAME),
    "bzip2": (bz2.compress(b"x" * 99), "bzip2", "unpack it first"),
    "xz": (lzma.compress(b"x" * 99), "xz", "unpack it first"),
    "zstd": (b"\x28\xb5\x2f\xfd rest", "Zstandard", RENAME),
    "zip": (b"PK\x03\x04 rest", "zip", "unpack it first"),
    "parquet": (b"PAR1 rest", "Parquet", RENAME),
    "arrow": (b"ARROW1\0\0 rest", "Arrow", RENAME),
    "numpy": (b"\x93NUMPY\x01\0 rest", "NumPy", OTHER),
    "tokens": (b"\x89TOKENS\n rest", "tokens", TOKENS),
    "megatron": (b"MMIDIDX\0\0 rest", "tokens", TOKENS),
}


@pytest.mark.parametrize("suffix", NAMES)
@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer": "bpe", "vocab_size": 300}], ids=["bytes", "bpe"])
def test_a_file_whose_name_is_not_that_of_a_text_is_refused(tmp_path, suffix, tokenizer):
    path = tmp_path / f"web{suffix}"
    path.write_text("to be or not to be\n" * 50)
    what, way = NAMES[suffix]
    [problem] = check_text(text(path, **tokenizer))
    assert str(problem) == (
        f"data.path: {path}: {what} by its name, but data=text reads plain text; {way.format(path=path)}"
    )


@pytest.mark.parametrize(("data", "what", "way"), STARTS.values(), ids=STARTS)
def test_a_file_whose_first_bytes_are_not_text_is_refused(tmp_path, data, what, way):
    path = tmp_path / "web.txt"
    path.write_bytes(data)
    [problem] = check_text(text(path))
    assert str(problem) == (
        f"data.path: {path}: {what} by its first bytes, but data=text reads plain text; {way.format(path=path)}"
    )


def test_text_that_is_too_long_for_memory_is_read_byte_by_byte_only(tmp_path):
    path = tmp_path / "web.txt"
    path.write_bytes(b"x" * (64 << 10))
    os.truncate(path, 1 << 42)
    [problem] = check_text(text(path, tokenizer="bpe", vocab_size=300))
    assert str(problem) == (
        f"data.path: {path}: {1 << 42} bytes; data.tokenizer=bpe reads at most {1 << 30}, all into memory; "
        "data.tokenizer=bytes with data.vocab_size=256 reads any bytes"
    )


@pytest.mark.parametrize("at", [0, 70, (64 << 10) - 1])
def test_a_file_with_nul_bytes_is_refused(tmp_path, at):
    path = tmp_path / "web.txt"
    path.write_bytes(b"x" * at + b"\0" + b"x" * 100)
    [problem] = check_text(text(path))
    assert str(problem) == (
        f"data.path: {path}: byte {at} is NUL, so it is not plain text: write the text to a UTF-8 file first; "
        "data=tokens reads prepared tokens"
    )


@pytest.mark.parametrize("name", ["a.txt", "README.md", "web", "web.de", "a.py", "poem.tex", "json", "web.gz.txt"])
def test_text_of_any_other_name_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_text("Sein oder Nichtsein, das ist hier die Frage: ä\n" * 50, encoding="utf-8")
    assert list(check_text(text(path))) == []
