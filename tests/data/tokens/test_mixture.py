"""Laws of mixtures by weight."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.tokens.corpus import PERIOD, Mixture

parts = st.lists(st.integers(1, 60), min_size=1, max_size=9)
ORDER = ([0, 1, 0, 1, 0, 2, 0, 1], [0, 0, 1, 1, 2, 0, 3, 2])
weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


def shares(counts) -> list[Fraction]:
    return [Fraction(n, sum(counts)) for n in counts]


@given(parts)
def test_of_any_first_samples_each_source_has_its_share_rounded_up_or_down(counts):
    n = 2 * sum(counts)
    chosen, _ = Mixture(tuple(counts)).at(np.arange(n))
    for s, share in enumerate(shares(counts)):
        so_far = np.cumsum(chosen == s)
        assert all(abs(int(so_far[k - 1]) - k * share) < 1 for k in range(1, n + 1))


@given(weights)
def test_weights_that_have_no_short_period_are_kept_to_within_one_in_65536(given_weights):
    mixture = Mixture.from_weights(given_weights)
    assert sum(mixture.counts) <= PERIOD
    for weight, share in zip(given_weights, shares(mixture.counts), strict=True):
        exact = Fraction(str(weight)) / sum(Fraction(str(w)) for w in given_weights)
        assert share == exact or abs(share - exact) < Fraction(1, PERIOD)


def test_a_long_period_keeps_the_shares_too():
    mixture = Mixture.from_weights([np.pi, 1.0, 0.001])
    n = sum(mixture.counts)
    assert n == PERIOD
    chosen, _ = mixture.at(np.arange(n))
    for s, share in enumerate(shares(mixture.counts)):
        off = np.cumsum(chosen == s) - np.arange(1, n + 1) * float(share)
        assert abs(off).max() < 1


@pytest.mark.parametrize(
    ("given_weights", "counts"),
    [
        ([1.0], (1,)),
        ([0.7, 0.3], (7, 3)),
        ([70, 30], (7, 3)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([1e-9, 1], (0, PERIOD)),
        ([0.333333, 0.666667], (21845, 43691)),
    ],
)
def test_weights_become_counts(given_weights, counts):
    assert Mixture.from_weights(given_weights).counts == counts


def test_the_order_of_sources_is_the_same_for_ever():
    chosen, before = Mixture((3, 2, 1)).at(np.arange(8))
    assert (chosen.tolist(), before.tolist()) == ORDER


@given(parts, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_a_sample_is_a_pure_function_of_its_index(counts, indices):
    mixture = Mixture(tuple(counts))
    together = [a.tolist() for a in mixture.at(np.array(indices))]
    apart = [mixture.at(np.array([i])) for i in indices]
    assert together == [[int(a[k][0]) for a in apart] for k in (0, 1)]


@given(parts)
def test_the_samples_of_a_source_are_counted_one_by_one(counts):
    chosen, before = Mixture(tuple(counts)).at(np.arange(3 * sum(counts)))
    for s in range(len(counts)):
        assert before[chosen == s].tolist() == list(range(3 * counts[s]))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=5))
def test_an_epoch_ends_with_the_last_window_that_was_not_read(sources):
    counts, sizes = zip(*sources, strict=True)
    mixture = Mixture(counts)
    n = mixture.epoch(sizes)
    chosen, _ = mixture.at(np.arange(n))
    read = [int((chosen == s).sum()) for s in range(len(sizes))]
    assert all(have >= size for have, size in zip(read, sizes, strict=True))
    last = int(chosen[-1])
    assert read[last] == sizes[last]
