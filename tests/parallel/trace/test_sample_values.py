"""Values of a data set's first samples follow a forward on meta tensors, and are computed when they are needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from launcher.parallel.trace.sample_values import SampleValues, TrialValues, using_trial_values

LENGTH = 301
BATCHES = tuple((torch.full((2, LENGTH), n, device="cpu"),) for n in (1, 2))

WEIGHT = torch.empty(2, LENGTH, device="meta")


@pytest.fixture
def tokens() -> Tensor:
    return torch.empty(2, LENGTH, dtype=torch.int64, device="meta")


@pytest.fixture
def known(tokens: Tensor) -> Iterator[SampleValues]:
    trial = TrialValues(BATCHES, lambda name: torch.empty(0))
    with using_trial_values(trial), torch.device("meta"), SampleValues([tokens]) as values:
        yield values


def masks_in_memory() -> int:
    return sum(type(t) is Tensor and not t.is_meta and t.shape == (LENGTH, LENGTH) for t in gc.get_objects())


def test_a_mask_is_not_computed_until_it_is_read(known):
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    assert not masks_in_memory()
    assert torch.equal(known.of(mask), torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cpu").triu(1))


def test_values_go_with_their_tensor(known):
    mask = torch.ones(LENGTH, LENGTH)
    known.of(mask)
    assert masks_in_memory()
    del mask
    gc.collect()
    assert not masks_in_memory()


def test_results_of_before_an_in_place_change_are_those_of_before(known, tokens):
    early, row = tokens * 10, tokens[0]
    tokens.add_(1)
    late = tokens * 10
    assert [known.of(t, 1)[0, 0].item() for t in (early, tokens, late)] == [20, 3, 30]
    assert known.of(row, 1)[0].item() == 3


def test_a_result_has_the_default_dtype_of_its_call(known):
    torch.set_default_dtype(torch.float64)
    try:
        ones = torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert known.of(ones).dtype is torch.float64


def test_a_chain_of_calls_may_be_longer_than_pythons_stack(known, tokens):
    total = tokens
    for _ in range(1500):
        total = total + 1
    assert known.of(total, 1)[0, 0].item() == 1502


def test_what_depends_on_a_weight_or_on_a_failed_call_is_unknown(known, tokens):
    assert known.of(tokens * WEIGHT) is None
    beyond = torch.ones(1).index_select(0, tokens[0])
    assert known.of(beyond + 1) is None
    assert known.of(beyond.add_(1)) is None
