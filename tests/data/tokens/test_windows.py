"""Samples from files of tokens: windows, mixtures, invalid tokens, and processes that share the files."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.open import open_data
from launcher.data.shuffle import batch_indices
from launcher.data.source import Source
from launcher.data.tokens import formats
from launcher.data.tokens.corpus import Mixture
from launcher.data.tokens.windows import MixedSource, TokenWindows, Windows
from launcher.errors import RunError
from launcher.job.schema.data import Tokens
from tests.data.token_bytes import little, llm_c, megatron, own

SEQ = 4


def opened(**changes):
    return open_data(Tokens.model_validate({"name": "tokens", "seq_len": SEQ, "val_fraction": 0, **changes}), seed=0)


def samples(source: Source) -> list[list[int]]:
    return [row.tolist() for row in source.inputs(np.arange(len(source)))[0]]


def folder(tmp_path: Path, *sizes: int) -> str:
    """Files whose tokens are consecutive numbers, continued from file to file."""
    at = 0
    for k, n in enumerate(sizes):
        (tmp_path / f"{k}.tokens").write_bytes(own(list(range(at, at + n)), 60_000))
        at += n
    return str(tmp_path)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_samples_are_those_of_each_file_as_if_it_were_in_memory(tmp_path_factory, sizes, seq_len):
    if max(sizes) <= seq_len:
        sizes = [*sizes, seq_len + 1]
    source = opened(path=folder(tmp_path_factory.mktemp("of"), *sizes), seq_len=seq_len).train
    starts = np.cumsum([0, *sizes])
    parts = [Windows(np.arange(a, b), seq_len) for a, b in pairwise(starts)]
    every = [(part.inputs(np.arange(len(part)))[0], part.targets(np.arange(len(part)))) for part in parts]
    x, y = (torch.cat(rows) for rows in zip(*every, strict=True))
    indices = np.random.default_rng(0).permutation(len(source))
    assert len(source) == len(x)
    assert torch.equal(source.inputs(indices)[0], x[indices])
    assert torch.equal(source.targets(indices), y[indices])
    assert source.targets(indices).dtype == torch.int64


def test_every_format_gives_the_same_samples(tmp_path):
    tokens = list(range(100, 150))
    (tmp_path / "own.tokens").write_bytes(own(tokens, 300))
    (tmp_path / "nanogpt.bin").write_bytes(little("H", tokens))
    (tmp_path / "llmc.bin").write_bytes(llm_c(tokens))
    megatron(tmp_path / "megatron.bin", [tokens[:7], tokens[7:]], letter="i")
    names = ("own.tokens", "nanogpt.bin", "llmc.bin", "megatron.bin")
    each = [samples(opened(path=str(tmp_path / name), vocab_size=300).train) for name in names]
    assert each == [[tokens[k : k + SEQ] for k in range(0, 45 + SEQ - 1, SEQ)]] * 4


def test_held_out_windows_are_the_last_of_each_source_or_files_of_their_own(tmp_path):
    path = folder(tmp_path, 41, 21)
    data = opened(path=path, val_fraction=0.2)
    assert (len(data.train), len(data.val)) == (12, 3)
    assert samples(data.val) == [[49, 50, 51, 52], [53, 54, 55, 56], [57, 58, 59, 60]]
    data = opened(path=f"{path}/0.tokens", val=f"{path}/1.tokens", val_fraction=0.2)
    assert (len(data.train), len(data.val), data.entropy) == (10, 5, None)


def test_a_mixture_reads_small_sources_again(tmp_path):
    folder(tmp_path, 41, 9)
    sources = [{"path": f"{tmp_path}/0.tokens", "weight": 0.5}, {"path": f"{tmp_path}/1.tokens", "weight": 0.5}]
    train = opened(sources=sources).train
    firsts = [row[0] for row in samples(train)]
    assert len(train) == 19
    assert firsts[::2] == list(range(0, 40, 4))
    assert firsts[1::2] == [41, 45] * 4 + [41]
    assert train.targets(np.array([1, 0])).tolist() == [[42, 43, 44, 45], [1, 2, 3, 4]]


def test_the_samples_of_a_step_do_not_depend_on_who_reads_them(tmp_path):
    """Any split of a batch over ranks, also in a resumed run, reads what one uninterrupted process reads."""
    folder(tmp_path, 101, 57, 33)
    sources = [{"path": f"{tmp_path}/{k}.tokens", "weight": w} for k, w in enumerate((0.5, 0.3, 0.2))]
    steps = 20
    whole = opened(sources=sources).train
    batches = [batch_indices(3, step, 8, len(whole)) for step in range(steps)]
    straight = [(whole.inputs(b)[0], whole.targets(b)) for b in batches]
    formats.mapped.cache_clear()
    for resumed_at, ranks in ((7, 2), (13, 4)):
        again = pickle.loads(pickle.dumps(opened(sources=sources).train))
        for step in range(resumed_at, steps):
            parts = np.split(batch_indices(3, step, 8, len(again)), ranks)
            x, y = (
                torch.cat(rows) for rows in zip(*((again.inputs(p)[0], again.targets(p)) for p in parts), strict=True)
            )
            assert torch.equal(x, straight[step][0])
            assert torch.equal(y, straight[step][1])


@pytest.mark.parametrize(
    ("letter", "bad", "told"), [("H", 300, 300), ("i", -1, -1), ("q", 1 << 40, 1 << 40)], ids=["H", "i", "q"]
)
def test_a_token_that_the_model_has_no_row_for_is_named_when_it_is_read(tmp_path, letter, bad, told):
    tokens = [*range(20), bad, *range(20)]
    path = megatron(tmp_path / "a.bin", [tokens], letter=letter)
    train = opened(path=str(path), vocab_size=300).train
    assert train.inputs(np.array([0, 4, 6]))[0][:, 0].tolist() == [0, 16, 3]
    for look, row in ((train.inputs, 5), (train.targets, 4)):
        with pytest.raises(RunError) as refused:
            look(np.array([0, row]))
        assert str(refused.value) == (
            f"{path}: token 20 is {told}, which is not between 0 and 299: data.vocab_size is 300"
        )


def test_a_file_that_was_cut_since_it_was_checked_says_so(tmp_path):
    train = opened(path=folder(tmp_path, 41)).train
    path = tmp_path / "0.tokens"
    path.write_bytes(path.read_bytes()[:80])
    with pytest.raises(RunError) as refused:
        train.inputs(np.arange(1))
    assert str(refused.value) == f"{path}: cannot be read any more: mmap length is greater than file size"


def test_files_are_opened_by_each_process_when_it_reads_them(tmp_path):
    formats.mapped.cache_clear()
    train = opened(path=folder(tmp_path, 41, 41)).train
    assert formats.mapped.cache_info().currsize == 0
    assert len(pickle.dumps(train)) < 2000
    train.inputs(np.arange(1))
    assert formats.mapped.cache_info().currsize == 1
    assert len(pickle.dumps(train)) < 2000
    with get_context("fork").Pool(2) as pool:
        assert pool.map(partial(_first, train), [0, 1, 10, 11]) == [0, 4, 41, 45]


def _first(train: TokenWindows, index: int) -> int:
    return int(train.inputs(np.array([index]))[0][0, 0])


def test_a_file_of_terabytes_is_read_a_window_at_a_time(tmp_path):
    path = tmp_path / "huge.bin"
    path.touch()
    os.truncate(path, 1 << 42)
    train = opened(path=str(path), vocab_size=300, seq_len=1024).train
    tracemalloc.start()
    train.inputs(batch_indices(0, 0, 16, len(train)))
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 2**20))
def test_an_epoch_of_a_mixture_has_every_window(sizes, seed):
    parts = [Windows(np.arange(100 * k, 100 * k + n + 1), 1) for k, n in enumerate(sizes)]
    weights = np.random.default_rng(seed).integers(1, 6, len(sizes)).tolist()
    mixed = MixedSource(parts, Mixture.from_weights(weights))
    read_once = {row[0] for row in samples(mixed)}
    assert read_once == {100 * k + i for k, n in enumerate(sizes) for i in range(n)}
