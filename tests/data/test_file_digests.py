"""What files contain is told by an amount and a digest: the same for a copy, another one for what was changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.data.file_digests import WHOLE, contents
from launcher.job.schema.data import Chat, RandomTokens, Text, Tokens


def tokens(path: Path, count: int, first: int = 1) -> Path:
    path.parent.mkdir(exist_ok=True)
    np.array([first, *range(count - 1)], np.uint32).astype(np.uint16).tofile(path)
    return path


def of_tokens(path: Path) -> str | None:
    return contents(Tokens(name="tokens", path=str(path), vocab_size=1 << 16, seq_len=8))


@pytest.mark.parametrize("count", [100, 40_000 + WHOLE], ids=["short", "read in part"])
def test_a_copy_has_the_same_contents_and_a_change_has_others(tmp_path, count):
    one = of_tokens(tokens(tmp_path / "a.bin", count))
    assert one is not None
    assert one.startswith(f"{count} tokens with the digest ")
    assert of_tokens(tokens(tmp_path / "b.bin", count)) == one
    assert of_tokens(tokens(tmp_path / "c.bin", count, first=2)) != one
    assert of_tokens(tokens(tmp_path / "d.bin", count + 1)) != one


def test_a_file_more_in_a_folder_is_another_content(tmp_path):
    tokens(tmp_path / "folder/a.bin", 100)
    one = of_tokens(tmp_path / "folder")
    tokens(tmp_path / "folder/b.bin", 100)
    assert of_tokens(tmp_path / "folder") != one


def test_text_counts_with_its_tokenizer(tmp_path):
    text, tokenizer = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    text.write_text("the text")
    tokenizer.write_text("{}")
    plain = contents(Text(name="text", path=str(text)))
    assert plain is not None
    assert plain.startswith("8 bytes with the digest ")
    by_file = Text(name="text", path=str(text), tokenizer="file", tokenizer_file=str(tokenizer))
    first = contents(by_file)
    tokenizer.write_text("{ }")
    assert len({plain, first, contents(by_file)}) == 3


def test_conversations_are_files_and_random_tokens_are_none():
    assert "bytes with the digest" in str(contents(Chat(name="chat")))
    assert contents(RandomTokens(name="random_tokens", vocab_size=64, seq_len=8)) is None
