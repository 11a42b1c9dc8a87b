"""Laws of the order of samples if they are too many to be sorted."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launcher.data import shuffle
from launcher.data.shuffle import SORTED, batch_indices, permuted

seeds = st.integers(0, 2**70)
ORDER = [96157809869, 775998624787, 84159821417, 424667160424, 793301776577, 671781382006]


@given(st.integers(1, 300), seeds, st.integers(0, 5))
def test_every_number_comes_once(n, seed, epoch):
    assert sorted(permuted(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@given(st.integers(SORTED + 1, 2**50), seeds, st.integers(0, 10**9))
def test_a_batch_of_many_samples_has_none_twice_and_is_the_same_for_any_batch_size(n, seed, step):
    step %= n // 64
    batch = batch_indices(seed, step, 64, n)
    assert (batch.dtype, len(set(batch.tolist()))) == (np.int64, 64)
    assert 0 <= batch.min() <= batch.max() < n
    halves = [batch_indices(seed, 2 * step + k, 32, n) for k in (0, 1)]
    assert np.concatenate(halves).tolist() == batch.tolist()


def test_an_epoch_of_many_follows_the_one_before_it(monkeypatch):
    monkeypatch.setattr(shuffle, "SORTED", 10)
    seen = np.concatenate([batch_indices(3, step, 8, 20) for step in range(5)]).tolist()
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_order_of_many_is_the_same_for_ever():
    assert permuted(np.arange(6), 10**12, seed=7, epoch=3).tolist() == ORDER


def test_samples_that_can_be_sorted_have_the_order_that_they_always_had():
    assert batch_indices(0, 0, 4, 6).tolist() == [1, 4, 5, 2]


def test_a_trillion_samples_take_no_memory():
    tracemalloc.start()
    batch_indices(0, 10**6, 512, 10**12)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_places_and_seeds_look_independent():
    """Pearson's chi-squared of where the first 65536 places are mapped, in 16 x 16 fields: 255 degrees of freedom."""
    n = 10**9
    drawn = permuted(np.arange(1 << 16), n, seed=1, epoch=0)
    fields = np.histogram2d(np.arange(1 << 16), drawn, bins=16, range=[[0, 1 << 16], [0, n]])[0]
    assert ((fields - 256) ** 2 / 256).sum() < 340  # once in 3000
