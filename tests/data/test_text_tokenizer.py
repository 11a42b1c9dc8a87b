"""Text as bytes, and byte-level BPE."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launcher.data import text_files, text_tokenizer, train_byte_pairs
from launcher.data.open import open_data
from launcher.data.text_tokenizer import decode_bytes, encode_bytes
from launcher.data.text_windows import open_text
from launcher.job.schema.data import Text


@given(st.text())
def test_bytes_there_and_back(text):
    assert decode_bytes(encode_bytes(text)) == text


def test_bytes_that_are_no_text_are_shown_as_such():
    assert decode_bytes([65, 255, 66]) == "A\N{REPLACEMENT CHARACTER}B"


def test_bpe_reads_the_shipped_text_back_and_is_trained_the_same_each_time():
    settings = Text(name="text", tokenizer="bpe", vocab_size=400, seq_len=32)
    one, two = open_data(settings, seed=0), open_data(settings, seed=1)
    train, val = text_files.split(settings)
    assert one.decode(one.train.tokens.tolist()) == train.tobytes().decode()
    assert one.decode(one.val.tokens.tolist()) == val.tobytes().decode()
    assert np.array_equal(one.train.tokens, two.train.tokens)
    assert int(one.train.tokens.max()) < 400
    assert len(one.train.tokens) < len(train) / 1.7
    assert one.decode(one.encode("Été\n\n\N{SNOWMAN}  Romeo ")) == "Été\n\n\N{SNOWMAN}  Romeo "


def test_a_tokenizer_read_from_a_file_is_the_one_that_was_saved(tmp_path):
    trained = train_byte_pairs.train("to be or not to be\n" * 50, 270)
    trained.save(str(tmp_path / "tokenizer.json"))
    settings = Text(
        name="text", tokenizer="file", tokenizer_file=str(tmp_path / "tokenizer.json"), vocab_size=300, seq_len=32
    )
    data = open_text(settings)
    assert data.encode is not None
    assert data.decode is not None
    assert data.encode("to be, or not") == [int(i) for i in text_tokenizer.encode(trained, "to be, or not")]
    assert data.decode(data.encode("to be, or not")) == "to be, or not"
