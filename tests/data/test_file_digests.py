"""An amount and a digest identify the contents of files: equal for a copy, different after a change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.data import file_digests
from launcher.data.file_digests import LARGEST_DIGESTED, contents
from launcher.job.schema.data import Chat, Cifar10, Idx, ImageFolder, Mnist5k, RandomTokens, Text, Tokens
from tests.data.sample_files import write_cifar, write_idx


def tokens(path: Path, count: int, first: int = 1) -> Path:
    path.parent.mkdir(exist_ok=True)
    np.array([first, *range(count - 1)], np.uint32).astype(np.uint16).tofile(path)
    return path


def of_tokens(path: Path) -> str | None:
    return contents(Tokens(name="tokens", path=str(path), vocab_size=1 << 16, seq_len=8))


@pytest.mark.parametrize("count", [100, 40_000 + LARGEST_DIGESTED], ids=["short", "read in part"])
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


def images(root: Path, count: int = 4) -> ImageFolder:
    for k in range(count):
        path = root / "ab"[k % 2] / f"{k:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([k]) * 20)
    return ImageFolder(name="images", root=str(root))


def test_images_count_by_their_names_and_contents_wherever_they_are(tmp_path):
    asked = images(tmp_path / "one")
    first = contents(asked)
    assert str(first).startswith("4 files with the digest ")
    assert contents(images(tmp_path / "two")) == first

    # a pixel, a class, another image, held-out images
    seen = {first}
    (tmp_path / "one/a/000.png").write_bytes(bytes([9]) * 20)
    seen.add(contents(asked))
    (tmp_path / "one/a/000.png").rename(tmp_path / "one/b/000.png")
    seen.add(contents(asked))
    (tmp_path / "one/a/more.png").write_bytes(b"more")
    seen.add(contents(asked))
    seen.add(contents(ImageFolder(name="images", root=str(tmp_path / "one"), val=str(tmp_path / "two"))))
    assert len(seen) == 5


def test_of_many_images_all_names_count_and_a_part_of_the_contents(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "SAMPLED", 3)
    asked = images(tmp_path, 20)
    first = contents(asked)
    (tmp_path / "a/002.png").write_bytes(b"another")
    assert contents(asked) == first
    (tmp_path / "b/019.png").write_bytes(b"the last")
    assert contents(asked) != first
    before = contents(asked)
    (tmp_path / "a/002.png").rename(tmp_path / "a/003.png")
    assert contents(asked) != before


def test_files_of_idx_and_cifar_count(tmp_path):
    write_idx(tmp_path / "idx", "")
    asked = Idx(name="idx", root=str(tmp_path / "idx"))
    first = contents(asked)
    write_idx(tmp_path / "idx", "", seed=1)
    assert str(first).startswith("4 files with the digest ")
    assert contents(asked) != first
    write_cifar(tmp_path / "cifar", ".bin")
    assert str(contents(Cifar10(name="cifar10", root=str(tmp_path / "cifar")))).startswith("6 files with the digest ")
    assert "bytes with the digest" in str(contents(Mnist5k(name="mnist5k")))
