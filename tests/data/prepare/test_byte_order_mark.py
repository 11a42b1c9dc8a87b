"""A byte order mark is not text: ``data=text`` and ``prepare`` omit it and make the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launcher.data.open import open_data
from launcher.data.prepare import text_cache
from launcher.data.prepare.progress import ProgressReporter
from launcher.data.source import Dataset
from launcher.job.schema.data import Text
from tests.data.prepare.corpora import prepared, tokenizer, tokens

MARK = "\ufeff"
PLAIN = f"First \U0001f642 ñ words.\n{MARK}in the middle it is text\n" * 40


def read(data: Dataset) -> list[int]:
    """The tokens of all training samples, in file order."""
    inputs = data.train.inputs(np.arange(len(data.train)))[0]
    return [int(i) for i in inputs.flatten()]


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    out = {"marked": tmp_path / "marked.txt", "plain": tmp_path / "plain.txt"}
    out["marked"].write_bytes(f"{MARK}{PLAIN}".encode())
    out["plain"].write_bytes(PLAIN.encode())
    return out


@pytest.mark.parametrize("how", ["bytes", "file", "bpe"])
@pytest.mark.parametrize("cached", [False, True], ids=["by each process", "once"])
def test_text_and_prepare_omit_a_byte_order_mark(tmp_path, files, how, cached):
    more = {"tokenizer": how, "vocab_size": 600 if how != "bytes" else 256, "val_fraction": 0.0, "seq_len": 4}
    if how == "file":
        more["tokenizer_file"] = str(tokenizer(tmp_path))
    got = {}
    for name, path in files.items():
        settings = Text(name="text", path=str(path), cache=str(tmp_path / "cache") if cached else None, **more)
        text_cache.make(settings, print, ProgressReporter("off", print))
        got[name] = read(open_data(settings, seed=0))
    assert got["marked"] == got["plain"]
    assert len(got["plain"]) > 100
    if how == "bpe":  # prepare trains one with an end-of-document token
        return

    ours = prepared(src=str(files["marked"]), dst=str(tmp_path / "d"), tokenizer=how, **(
        {"tokenizer_file": more["tokenizer_file"]} if how == "file" else {}
    ))  # fmt: skip
    assert ours.documents == 1
    theirs = tokens(tmp_path / "d")
    assert theirs[: len(got["plain"])] == got["plain"]
    alone = [*PLAIN.encode()]
    if how == "file":
        alone = Tokenizer.from_file(more["tokenizer_file"]).encode(PLAIN, add_special_tokens=False).ids
    assert theirs[:-1] == alone


def test_the_first_json_line_may_begin_with_a_byte_order_mark(tmp_path):
    row = json.dumps({"text": "words"})
    (tmp_path / "a.jsonl").write_text(f"{MARK}{row}\n{row}\n", encoding="utf-8")
    prepared(src=str(tmp_path / "a.jsonl"), dst=str(tmp_path / "d"), tokenizer="bytes")
    assert tokens(tmp_path / "d") == [*b"words", 256] * 2
