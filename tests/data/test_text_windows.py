"""Plain text as bytes or as tokens of BPE."""

from __future__ import annotations

import pytest

from launcher.data.open import open_data
from launcher.errors import RequestError
from launcher.job.schema.data import Text


def test_bpe_that_leaves_too_few_tokens_says_so(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("ab\n" * 20, encoding="utf-8")
    settings = Text(name="text", path=str(file), tokenizer="bpe", vocab_size=300, seq_len=50, val_fraction=0)
    with pytest.raises(RequestError) as refused:
        open_data(settings, seed=0)
    assert str(refused.value) == (
        f"data.path: {file}: 40 training tokens are too few: a sample needs 51 (data.seq_len=50, and one for the "
        "last target) (try: data.tokenizer=bytes data.vocab_size=256)"
    )
