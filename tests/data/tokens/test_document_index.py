"""Where documents are in files, and that windows contain all of them uncut, in little memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.tokens import bin_packing as module
from launcher.data.tokens.bin_packing import best_fit, document_index
from launcher.data.tokens.formats import token_file
from tests.data.token_bytes import own

END = 0


@given(st.lists(st.integers(1, 12), max_size=60), st.integers(12, 30))
def test_no_bin_is_overfull_and_few_are_half_empty(lengths, capacity):
    bins = best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(bins, weights=lengths) if lengths else np.zeros(0)
    assert (filled <= capacity).all()
    assert (filled > 0).all()
    assert len(filled) <= 2 * -(-sum(lengths) // capacity)


def test_a_million_documents_leave_next_to_nothing():
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 1 << 20).astype(np.int64).clip(2, 2048)
    bins = best_fit(lengths, 2048)
    assert np.bincount(bins, weights=lengths).max() <= 2048
    assert bins.max() + 1 <= 1.0002 * lengths.sum() / 2048


def by_hand(tokens: list[int], seq_len: int) -> list[tuple[int, int]]:
    """Every piece of a document that has a target, found token by token."""
    out, begun = [], 0
    for i, token in enumerate(tokens):
        last = token == END or i == len(tokens) - 1
        if last or i + 1 - begun == seq_len:
            out.append((begun, i + 1, last))
            begun = i + 1
    return [(a, b) for a, b, last in out if b - a > 1 or not last]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(1, 9), st.sampled_from([3, 7, 1 << 20]))
def test_all_pieces_of_all_documents_are_in_some_window(tmp_path_factory, tokens, seq_len, chunk):
    path = tmp_path_factory.mktemp("of") / "a.tokens"
    path.write_bytes(own(tokens, 5, end=END))
    file = token_file(path, "uint16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(module, "BLOCK", chunk)
        single, packed = (document_index.__wrapped__(file, seq_len, how) for how in ("single", "best_fit"))
    want = by_hand(tokens, seq_len)
    assert [single.window(i) for i in range(len(single))] == [[piece] for piece in want]
    windows = [packed.window(i) for i in range(len(packed))]
    assert Counter(piece for w in windows for piece in w) == Counter(want)
    assert all(sum(b - a for a, b in w) <= seq_len and w == sorted(w) for w in windows)


def test_memory_is_that_of_the_pieces(tmp_path):
    """The index of 4 million tokens in 40 thousand documents takes its own size and a chunk."""
    path = tmp_path / "a.tokens"
    path.write_bytes(own(([1] * 99 + [END]) * 40_000, 5, end=END))
    file = token_file(path, "uint16")
    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 1 << 16)
        patch.setattr(module, "BLOCK", 1 << 12)
        index = document_index.__wrapped__(file, 1024, "best_fit")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert len(index) == 9 * -(-(1 << 12) // 10) + -(-(40_000 - 9 * (1 << 12)) // 10)
