"""Laws of the order of samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.shuffle import batch_indices, permutation

seeds = st.integers(0, 2**70)
counts = st.integers(1, 40)
sizes = st.integers(1, 90)
ORDER = [4, 5, 1, 0, 10, 8, 3, 11, 6, 9, 2, 7]


@given(seeds, sizes, counts, st.integers(1, 4))
def test_every_sample_comes_once_an_epoch(seed, batch_size, n, epochs):
    steps = -(-epochs * n // batch_size)
    seen = np.concatenate([batch_indices(seed, step, batch_size, n) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(seeds, st.integers(0, 30), sizes, counts)
def test_a_step_is_a_pure_function_of_its_arguments(seed, step, batch_size, n):
    first = batch_indices(seed, step, batch_size, n)
    permutation.cache_clear()
    assert np.array_equal(batch_indices(seed, step, batch_size, n), first)
    assert (first.dtype, first.shape) == (np.int64, (batch_size,))


@given(seeds, st.integers(0, 30), st.integers(1, 8), st.integers(1, 8), counts)
def test_the_order_does_not_depend_on_the_batch_size(seed, step, size, times, n):
    """Therefore micro batches, accumulated steps and any split over ranks read the same samples."""
    parts = [batch_indices(seed, step * times + i, size, n) for i in range(times)]
    assert np.array_equal(np.concatenate(parts), batch_indices(seed, step, size * times, n))


def test_seeds_and_epochs_differ():
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_of_a_seed_is_the_same_for_ever():
    assert permutation(7, 3, 12).tolist() == ORDER


def test_a_cached_permutation_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 3)[0] = 1
