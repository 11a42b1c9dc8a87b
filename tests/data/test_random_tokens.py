"""Random tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.open import open_data
from launcher.job.schema.data import RandomTokens


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
