"""Which files a request means, what is trained on and held out, and every message, word for word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.checks import check
from launcher.data.open import open_data
from launcher.data.tokens.corpus import corpus, files_of, split, total, windows
from launcher.data.tokens.token_file import TokenFile
from launcher.errors import RequestError
from launcher.job.schema.data import Tokens
from tests.data.token_bytes import little, megatron, own


def tokens(path=None, **changes) -> Tokens:
    path = [str(p) for p in path] if isinstance(path, list) else path if path is None else str(path)
    return Tokens.model_validate({"name": "tokens", "path": path, "seq_len": 4, "val_fraction": 0} | changes)


def problem_text(settings: Tokens) -> str:
    """All messages, which ``open_data`` must raise too."""
    with pytest.raises(RequestError) as refused:
        open_data(settings, seed=0)
    found = "\n".join(map(str, check(settings)))
    assert str(refused.value) == found
    return found


def write(path: Path, n: int = 9, vocab_size: int = 300) -> Path:
    path.write_bytes(own(list(range(n)), vocab_size))
    return path


def named(paths) -> list[str]:
    return [p.name for p in files_of(paths)]


def test_a_path_is_a_file_a_folder_a_pattern_or_a_list(tmp_path):
    for name in ("b.tokens", "a.bin", "c.tokens", "README.md", "a.idx", ".d.tokens.77"):
        write(tmp_path / name)
    assert named(str(tmp_path / "c.tokens")) == ["c.tokens"]
    assert named(str(tmp_path)) == ["a.bin", "b.tokens", "c.tokens"]
    assert named(f"{tmp_path}/[bc]*") == ["b.tokens", "c.tokens"]
    assert named((f"{tmp_path}/c.tokens", f"{tmp_path}/a*")) == ["c.tokens", "a.bin"]


def test_megatrons_files_are_named_by_either_or_by_what_they_share(tmp_path):
    megatron(tmp_path / "c_text_document.bin", [[1]])
    for name in ("c_text_document.bin", "c_text_document.idx", "c_text_document"):
        assert named(str(tmp_path / name)) == ["c_text_document.bin"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    assert files_of(str(write(tmp_path / "a[1].tokens"))) == [tmp_path / "a[1].tokens"]


def test_a_folder_with_files_named_as_held_out_is_refused(tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(bytes(100))
    assert problem_text(tokens(tmp_path, vocab_size=9)) == (
        f"data.path: {tmp_path}: by its name val.bin is held out, train.bin is not: "
        f"name the files of each by a pattern, {tmp_path}/NAME*.bin"
    )
    assert check(tokens(f"{tmp_path}/train*", val=f"{tmp_path}/val*", vocab_size=9)) == []


@pytest.mark.parametrize("name", ["evaluation_of_tests", "valley", "latest"])
def test_names_that_only_resemble_those_of_held_out_files_are_accepted(tmp_path, name):
    write(tmp_path / f"{name}.tokens")
    write(tmp_path / "web.tokens")
    assert check(tokens(tmp_path)) == []


def test_windows_do_not_span_files(tmp_path):
    paths = [write(tmp_path / "a.tokens", 8), write(tmp_path / "b.tokens", 9), write(tmp_path / "c.tokens", 4)]
    made, _ = corpus(tokens(paths))
    assert made is not None
    assert [(s.file.path.name, s.first, s.count) for s in made.train[0]] == [("a.tokens", 0, 1), ("b.tokens", 0, 2)]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 9), st.floats(0, 1))
def test_what_is_held_out_is_the_last_windows_and_no_other(sizes, seq_len, share):
    files = [TokenFile(Path(f"{k}.bin"), "uint16", 0, n) for k, n in enumerate(sizes)]
    every = [(s.file, s.first + k) for s in windows(files, seq_len) for k in range(s.count)]
    train, val = (
        [(s.file, s.first + k) for s in part for k in range(s.count)] for part in split(windows(files, seq_len), share)
    )
    assert train + val == every
    assert len(val) >= share * len(every) > len(val) - 1 or not every
    assert total(windows(files, seq_len)) == len(every) == sum(max(n - 1, 0) // seq_len for n in sizes)


def test_files_that_are_not_there_are_all_named(tmp_path):
    assert problem_text(tokens([tmp_path / "a.tokens", tmp_path / "b.bin"], val=f"{tmp_path}/v*")) == (
        f"data.path: {tmp_path}/a.tokens: No such file or directory\n"
        f"data.path: {tmp_path}/b.bin: No such file or directory\n"
        f"data.val: {tmp_path}/v*: no .tokens or .bin file matches"
    )


def test_a_folder_without_files_of_tokens(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY")
    assert problem_text(tokens(tmp_path)) == f"data.path: {tmp_path}: no .tokens or .bin file is in this folder"


def test_a_file_named_twice(tmp_path):
    path = write(tmp_path / "a.tokens")
    assert problem_text(tokens([path, tmp_path])) == f"data.path: {path}: named twice"


def test_files_that_are_bad_are_all_named(tmp_path):
    bad = tmp_path / "bad.tokens"
    bad.write_bytes(own([1, 2])[:-1])
    os.mkfifo(tmp_path / "pipe.tokens")
    sources = [{"path": str(bad), "weight": 1}, {"path": str(tmp_path / "pipe.tokens"), "weight": 1}]
    assert problem_text(tokens(sources=sources)) == (
        f"data.sources.0.path: {bad}: cut off: its header promises 2 tokens, 68 bytes with the header; it has 67\n"
        f"data.sources.1.path: {tmp_path}/pipe.tokens: a named pipe, not a regular file"
    )


def test_the_vocabulary_is_what_all_headers_say(tmp_path):
    a, b = write(tmp_path / "a.tokens", vocab_size=300), write(tmp_path / "b.tokens", vocab_size=400)
    assert problem_text(tokens(tmp_path)) == (
        f"data.vocab_size: null: {b} has tokens below 400, {a} below 300 (try: data.vocab_size=400)"
    )
    assert problem_text(tokens(tmp_path, vocab_size=399)) == (
        f"data.vocab_size: 399: {b} has tokens below 400 (try: data.vocab_size=400)"
    )
    made, _ = corpus(tokens(tmp_path, vocab_size=512))
    assert made is not None
    assert made.vocab_size == 512


def test_the_vocabulary_of_a_format_that_does_not_say_it(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(little("H", range(9)))
    assert problem_text(tokens(path)) == (
        f"data.vocab_size: null: {path} has a format that does not record it; give the number of tokens of its "
        "tokenizer, data.vocab_size=50257 for GPT-2"
    )


WINDOW = "a sample needs 5 tokens (data.seq_len=4, and one for the last target), all from one file"


def test_files_too_short_for_a_window(tmp_path):
    a = write(tmp_path / "a.tokens", 4)
    assert problem_text(tokens(a)) == (f"data.path: {a}: 4 tokens are too few: {WINDOW}")
    assert problem_text(tokens(write(tmp_path / "b.tokens"), val=str(a))) == (
        f"data.val: {a}: 4 tokens are too few: {WINDOW}"
    )
    write(tmp_path / "b.tokens", 3)
    assert problem_text(tokens(tmp_path)) == (f"data.path: {a}: the longest of 2 files, 4 tokens are too few: {WINDOW}")


def test_too_few_tokens_besides_the_held_out_ones_are_refused(tmp_path):
    a = write(tmp_path / "a.tokens", 5)
    assert problem_text(tokens(a, val_fraction=0.01)) == (
        f"data.path: {a}: 5 tokens, of which data.val_fraction=0.01 is held out, are too few: {WINDOW}"
    )


def test_held_out_files_are_not_trained_on(tmp_path):
    a = write(tmp_path / "a.tokens")
    (tmp_path / "link.tokens").symlink_to(a)
    assert problem_text(tokens(a, val=f"{tmp_path}/link.tokens")) == (
        f"data.val: {tmp_path}/link.tokens: it is both held out and trained on"
    )


def test_a_weight_that_is_nearly_nothing(tmp_path):
    a, b = write(tmp_path / "a.tokens"), write(tmp_path / "b.tokens")
    sources = [{"path": str(a), "weight": 1.0}, {"path": str(b), "weight": 1e-9}]
    assert (
        problem_text(tokens(sources=sources)) == "data.sources.1.weight: 1e-09 is less than one in 65536 of all weights"
    )


@pytest.mark.parametrize(
    ("changes", "given"),
    [({}, "neither is"), ({"path": "a", "sources": [{"path": "a", "weight": 1}]}, "both are")],
)
def test_one_of_path_and_sources_is_given(changes, given):
    with pytest.raises(RequestError) as refused:
        Tokens.model_validate({"name": "tokens", **changes})
    assert str(refused.value).endswith(f"one of data.path and data.sources must be given, but {given}")
