"""Text as windows of tokens."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.files import bpe, corpus
from launcher.data.files.text_checks import check_absent, check_text
from launcher.data.open import open_data
from launcher.data.plain_text import decode_bytes, encode_bytes, open_text
from launcher.data.source import entropy
from launcher.data.tokens import Windows
from launcher.errors import RequestError
from launcher.job.schema.components import RandomTokens, Text


@given(st.integers(0, 60), st.integers(1, 9))
def test_windows_do_not_overlap_and_targets_are_one_token_later(tokens, seq_len):
    source = Windows(np.arange(tokens, dtype=np.uint8), seq_len)
    n = len(source)
    assert n == max((tokens - 1) // seq_len, 0)
    indices = np.arange(n)
    (x,), y = source.inputs(indices), source.targets(indices)
    assert x.flatten().tolist() == list(range(n * seq_len))
    assert torch.equal(y, x + 1)
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)


def test_samples_come_in_the_order_asked_for():
    source = Windows(np.arange(10), 2)
    assert source.inputs(np.array([3, 0, 3]))[0].tolist() == [[6, 7], [0, 1], [6, 7]]


def test_the_shipped_text_is_the_one_that_its_source_note_describes():
    data, note = corpus.SHIPPED.read_bytes(), corpus.SHIPPED.with_name("SOURCE.md").read_text(encoding="utf-8")
    assert f"{len(data):,} bytes" in note
    assert sha256(data).hexdigest() in note
    assert set(data) <= {10, *range(32, 127)}
    assert not [w for w in (b" \n", b"\n\n\n", b"Gutenberg", b"opyright") if w in data]


def test_the_end_of_the_shipped_text_is_held_out():
    data = open_data(Text(name="text", seq_len=64), seed=0)
    whole = corpus.SHIPPED.read_bytes()
    assert (len(data.train), len(data.val)) == ((876_965 - 1) // 64, (97_440 - 1) // 64)
    assert data.decode(data.val.inputs(np.arange(1))[0][0].tolist()).encode() == whole[876_965 : 876_965 + 64]
    assert data.entropy == pytest.approx(3.3338, abs=1e-3)


def test_no_character_is_cut_in_two(tmp_path):
    text = "é\N{EURO SIGN}\U0001f600" * 5
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for tenths in range(11):
        parts = corpus.split(Text(name="text", path=str(tmp_path / "a.txt"), val_fraction=tenths / 10))
        assert "".join(p.tobytes().decode() for p in parts) == text


@given(st.text())
def test_bytes_there_and_back(text):
    assert decode_bytes(encode_bytes(text)) == text


def test_bytes_that_are_no_text_are_shown_as_such():
    assert decode_bytes([65, 255, 66]) == "A\N{REPLACEMENT CHARACTER}B"


def test_bpe_reads_the_shipped_text_back_and_is_trained_the_same_each_time():
    settings = Text(name="text", tokenizer="bpe", vocab_size=400, seq_len=32)
    one, two = open_data(settings, seed=0), open_data(settings, seed=1)
    train, val = corpus.split(settings)
    assert one.decode(one.train.tokens.tolist()) == train.tobytes().decode()
    assert one.decode(one.val.tokens.tolist()) == val.tobytes().decode()
    assert np.array_equal(one.train.tokens, two.train.tokens)
    assert int(one.train.tokens.max()) < 400
    assert len(one.train.tokens) < len(train) / 1.7
    assert one.decode(one.encode("Été\n\n\N{SNOWMAN}  Romeo ")) == "Été\n\n\N{SNOWMAN}  Romeo "


def test_bpe_that_leaves_too_few_tokens_says_so(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("ab\n" * 20, encoding="utf-8")
    settings = Text(name="text", path=str(file), tokenizer="bpe", vocab_size=300, seq_len=50, val_fraction=0)
    with pytest.raises(RequestError) as refused:
        open_data(settings, seed=0)
    assert str(refused.value) == (
        f"data.path: {file}: 40 tokens to train on are too few: a window takes data.seq_len=50 tokens "
        "and the next one (try: data.tokenizer=bytes data.vocab_size=256)"
    )


def test_entropy_is_that_of_the_targets():
    assert entropy(Windows(np.array([9, 0, 1, 0, 1]), 2)) == pytest.approx(np.log(2))
    assert entropy(Windows(np.array([9, 0, 0, 3, 1]), 4)) == pytest.approx(1.5 * np.log(2))
    assert entropy(Windows(np.array([9, 4, 4]), 1)) == 0
    assert entropy(Windows(np.array([9]), 1)) is None


@given(st.integers(0, 2**40), st.integers(1, 300), st.integers(1, 9))
def test_random_tokens_are_a_pure_function_of_seed_and_sample(seed, vocab_size, seq_len):
    settings = RandomTokens(name="random_tokens", vocab_size=vocab_size, seq_len=seq_len, samples=20)
    data = open_data(settings, seed=seed)
    assert (len(data.train), len(data.val)) == (20, 2)
    (x,), y = data.train.inputs(np.arange(20)), data.train.targets(np.arange(20))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert 0 <= int(x.min()) <= int(x.max()) < vocab_size
    assert torch.equal(open_data(settings, seed=seed).train.inputs(np.array([7]))[0], x[7:8])


def test_random_tokens_are_uniform_and_differ_by_seed_and_split():
    settings = RandomTokens(name="random_tokens", vocab_size=8, seq_len=1000, samples=80)
    zero, one = (open_data(settings, seed=s) for s in (0, 1))
    share = np.bincount(zero.train.inputs(np.arange(80))[0].numpy().ravel()) / 80_000
    np.testing.assert_allclose(share, 1 / 8, atol=0.005)
    first = np.arange(1)
    rows = {tuple(s.inputs(first)[0][0].tolist()) for s in (zero.train, zero.val, one.train, one.val)}
    assert len(rows) == 4


def test_a_tokenizer_read_from_a_file_is_the_one_that_was_saved(tmp_path):
    trained = bpe.train("to be or not to be\n" * 50, 270)
    trained.save(str(tmp_path / "tokenizer.json"))
    settings = Text(
        name="text", tokenizer="file", tokenizer_file=str(tmp_path / "tokenizer.json"), vocab_size=300, seq_len=32
    )
    data = open_text(settings)
    assert data.encode is not None
    assert data.decode is not None
    assert data.encode("to be, or not") == [int(i) for i in bpe.encode(trained, "to be, or not")]
    assert data.decode(data.encode("to be, or not")) == "to be, or not"


def test_a_tokenizer_file_that_does_not_fit_says_so(tmp_path):
    def said(path, vocab_size):
        settings = Text(
            name="text", tokenizer="file", tokenizer_file=str(path), vocab_size=vocab_size, seq_len=32, val_fraction=0
        )
        [problem] = [*check_text(settings), *check_absent(settings)]
        return str(problem.key), problem.text, problem.cure

    bpe.train("to be or not to be\n" * 50, 270).save(str(tmp_path / "tokenizer.json"))
    assert said(tmp_path / "no.json", 300) == ("data.tokenizer_file", f"{tmp_path / 'no.json'}: no such file", "")
    assert said(tmp_path / "tokenizer.json", 256) == (
        "data.vocab_size",
        f"256: {tmp_path / 'tokenizer.json'} has 265 tokens",
        "data.vocab_size=265",
    )
    (tmp_path / "bad.json").write_text("{}")
    key, text, cure = said(tmp_path / "bad.json", 300)
    assert (key, cure) == ("data.tokenizer_file", "")
    assert text.startswith(f"{tmp_path / 'bad.json'}: not a tokenizer: ")
