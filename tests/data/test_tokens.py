"""Windows over one long row of tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.tokens.windows import Windows


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
