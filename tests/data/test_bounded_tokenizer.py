"""A stranger's tokenizer that takes too much is refused before anything starts, in one line and without a backtrace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from launcher.data import text_tokenizer
from launcher.data.bounded_tokenizer import TokenizerError, native_errors
from launcher.data.limited_child import ChildFailed, LimitExceeded, in_child
from launcher.steps.model import exported_folder

HERE = "tests.data.test_bounded_tokenizer"


def plain() -> Tokenizer:
    vocab = {chr(c): c - 32 for c in range(32, 127)} | {"<unk>": 95, "<end>": 96}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def saved(folder: Path, **parts) -> Path:
    tokenizer = plain()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder / "tokenizer.json"


CASES = {
    "a long replacement": (
        {"normalizer": normalizers.Replace("a", "a" * 100_000)},
        "the character 'a' becomes 100000 characters",
    ),
    "nested replacements": (
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "a" * 30)] * 7)},
        "on short texts it takes more than ",
    ),
    "a pattern that backtracks": (
        {"pre_tokenizer": pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")},
        "the tokenizer fails: Onig: Regex search error: retry-limit-in-match over",
    ),
}


@pytest.mark.parametrize(("parts", "reason"), CASES.values(), ids=CASES)
def test_a_tokenizer_that_takes_too_much_time_or_memory_is_refused(tmp_path, parts, reason, capfd):
    file = saved(tmp_path, **parts)
    with pytest.raises(ValueError, match="tokenizer") as caught:
        text_tokenizer.load(file)
    assert str(caught.value).startswith(f"{file}: it cannot be used as a tokenizer: {reason}")
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_fails_on_the_corpus_ends_in_one_line_without_a_backtrace(tmp_path):
    """The trial cannot know the text that its pattern fails on."""
    file = saved(tmp_path, pre_tokenizer=pre_tokenizers.Split(Regex(r"(q+)+$"), "isolated"))
    (tmp_path / "a.txt").write_text("q" * 60 + "!\n")
    words = ["src=a.txt", "dst=out", "tokenizer_file=tokenizer.json", "workers=1"]
    done = subprocess.run(
        [sys.executable, "-m", "launcher.data.prepare", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RUST_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert file.is_file()
    reason = "tokenizer.json: the tokenizer fails: Onig: Regex search error: retry-limit-in-match over"
    assert (done.returncode, done.stderr) == (1, f"error: {reason}\n")


@pytest.mark.parametrize("last", [(1 << 31) - 1, 1 << 31, (1 << 32) - 1])
def test_ids_have_31_bits(tmp_path, last):
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(file))  # the library would try all ids up to the last
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {"a": 0, "b": last}
    file.write_text(json.dumps(content))
    if last < 1 << 31:
        assert text_tokenizer.vocab_size(text_tokenizer.load(file)) == 1 << 31
        return
    text = f"it cannot be used as a tokenizer: its token 'b' has the id {last}; ids must be below 2147483648"
    with pytest.raises(ValueError, match=f"^{file}: {text}$"):
        text_tokenizer.load(file)


def test_an_ordinary_tokenizer_is_tried_once_and_then_loaded(tmp_path, monkeypatch):
    file, calls = saved(tmp_path), []
    monkeypatch.setattr(
        "launcher.data.bounded_tokenizer.in_child", lambda *a, **k: (calls.append(a), in_child(*a, **k))[1]
    )
    assert text_tokenizer.load(file).get_vocab_size() == text_tokenizer.load(file).get_vocab_size() == 97
    assert len(calls) == 1


def test_only_errors_of_the_tokenizers_library_become_a_tokenizer_error():
    with pytest.raises(KeyboardInterrupt), native_errors("a.json"):
        raise KeyboardInterrupt
    with pytest.raises(TokenizerError, match=r"^a\.json: the tokenizer fails: no\\x1bsuch$"), native_errors("a.json"):
        raise ValueError("no\x1bsuch\nand more")


def loops(_):
    while True:
        pass


def grows(_):
    return bytearray(1 << 40)


def fails(text):
    raise ValueError(text)


@pytest.mark.parametrize(
    ("do", "error", "text"),
    [
        (loops, LimitExceeded, "it takes more than 1 s"),
        (grows, LimitExceeded, "it takes more than 256 MiB"),
        (fails, ChildFailed, "no"),
    ],
    ids=["time", "memory", "error"],
)
def test_a_child_process_ends_at_its_limits_of_time_and_memory(do, error, text):
    with pytest.raises(error) as caught:
        in_child(do, "no", module=HERE, seconds=1, nbytes=256 << 20)
    assert str(caught.value) == text


def test_a_written_folder_is_read_back_with_the_same_trial(tmp_path):
    file = saved(tmp_path, normalizer=normalizers.Replace("a", "a" * 100_000))
    with pytest.raises(ValueError, match="it cannot be used as a tokenizer") as caught:
        exported_folder.read_beside(tmp_path)
    assert str(caught.value).startswith(f"{file}: it cannot be used as a tokenizer: the character 'a' becomes 100000")
