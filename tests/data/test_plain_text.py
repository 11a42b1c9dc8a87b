"""Plain text as bytes or as tokens of BPE."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.open import open_data
from launcher.data.plain_text import decode_bytes, encode_bytes
from launcher.errors import RequestError
from launcher.job.schema.components import Text


@given(st.text())
def test_bytes_there_and_back(text):
    assert decode_bytes(encode_bytes(text)) == text


def test_bytes_that_are_no_text_are_shown_as_such():
    assert decode_bytes([65, 255, 66]) == "A\N{REPLACEMENT CHARACTER}B"


def test_bpe_that_leaves_too_few_tokens_says_so(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("ab\n" * 20, encoding="utf-8")
    settings = Text(name="text", path=str(file), tokenizer="bpe", vocab_size=300, seq_len=50, val_fraction=0)
    with pytest.raises(RequestError) as refused:
        open_data(settings, seed=0)
    assert str(refused.value) == (
        f"data.path: {file}: 40 tokens to train on are too few: a window takes data.seq_len=50 tokens "
        "plus one (try: data.tokenizer=bytes data.vocab_size=256)"
    )
