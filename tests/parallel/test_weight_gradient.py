"""A backward in two halves gives what a whole one gives, whatever the weights are used for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from launcher.parallel.weight_gradient import Deferral
from tests.parallel.weight_nets import LENGTH, OPS, WIDTH, WORDS, Net

MICROS = 3
Micro = tuple[Tensor, Tensor, Tensor]


def net(ops: Sequence[str]) -> Net:
    torch.manual_seed(3)
    return Net(ops).double()


def micros(leaf: bool) -> list[Micro]:
    g = torch.Generator().manual_seed(4)
    make = lambda: torch.randn(2, LENGTH, WIDTH, generator=g, dtype=torch.float64)  # noqa: E731
    tokens = torch.randint(0, WORDS, (2, LENGTH), generator=g)
    return [(make().requires_grad_(leaf), tokens, make()) for _ in range(MICROS)]


def whole(ops: Sequence[str], leaf: bool) -> list[Tensor | None]:
    """Gradients of all parameters and inputs, from plain backwards."""
    model, batch = net(ops), micros(leaf)
    for x, tokens, goal in batch:
        loss = (model(x, tokens) * goal).sum()
        if loss.requires_grad:
            loss.backward()
    return [*(p.grad for p in model.parameters()), *(x.grad for x, _, _ in batch)]


def halves(ops: Sequence[str], leaf: bool) -> tuple[list[Tensor | None], int]:
    """The same in two halves, the second two micro batches late; and how many products were put off."""
    model, batch, deferral = net(ops), micros(leaf), Deferral()
    waiting, count = [], 0
    for x, tokens, goal in batch:
        with deferral.running((x, tokens)):
            out = model(x, tokens)
        loss = (out * goal).sum()
        if loss.requires_grad:
            with deferral.deferring((loss,)) as queue:
                loss.backward()
            waiting.append(queue)
            count += len(queue)
        if len(waiting) > 2:
            finish(waiting.pop(0))
    for queue in waiting:
        finish(queue)
    return [*(p.grad for p in model.parameters()), *(x.grad for x, _, _ in batch)], count


def finish(queue):
    for product in queue:
        product.add()


def assert_same(ops: Sequence[str], leaf: bool = True) -> int:
    expected, (got, count) = whole(ops, leaf), halves(ops, leaf)
    for e, g in zip(expected, got, strict=True):
        assert (e is None) == (g is None)
        if e is not None and g is not None:
            assert (g.shape, g.dtype, g.stride()) == (e.shape, e.dtype, e.stride())
            assert (g - e).norm() <= 1e-12 * e.norm()
    storages = [g.untyped_storage()._cdata for g in got if g is not None]
    assert len(set(storages)) == len(storages)
    return count


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=2, max_size=6), st.booleans())
def test_two_halves_are_a_whole_backward(ops, leaf):
    assert_same(ops, leaf)


PUT_OFF = {
    "linear": 1, "same_bias": 1, "without_bias": 1, "tied_head": 2, "tied_head_transposed": 2, "matrix": 1,
    "matrix_transposed": 2, "transformers_conv1d": 1, "addmm_of_activations": 1, "columns_first": 2, "skip": 1,
    "mixed": 1, "expanded": 1, "changed_in_place": 1, "detached": 1, "gradient_inside": 1, "weight_gradient_inside": 1,
    "matrix_permuted": 1, "matrix_of_itself": 1,
}  # fmt: skip
"""How many products each operation puts off; all others none."""


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_operation_alone_and_three_times(name):
    assert assert_same([name]) == MICROS * PUT_OFF.get(name, 0)
    assert_same([name] * 3)
    assert_same([name] * 2, leaf=False)
