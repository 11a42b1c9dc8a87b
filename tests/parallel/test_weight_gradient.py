"""A backward in two halves gives the gradients of a full one, whatever the weights are used for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from launcher.errors import RunError
from launcher.parallel.split_backward import Deferral, Rounding
from launcher.runtime.cluster.world import World
from tests.parallel.weight_nets import LENGTH, OPS, WIDTH, WORDS, Net
from tests.ranks import on_ranks

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


def full_backward_gradients(ops: Sequence[str], leaf: bool) -> list[Tensor | None]:
    """Gradients of all parameters and inputs, from plain backwards."""
    model, batch = net(ops), micros(leaf)
    for x, tokens, goal in batch:
        loss = (model(x, tokens) * goal).sum()
        if loss.requires_grad:
            loss.backward()
    return [*(p.grad for p in model.parameters()), *(x.grad for x, _, _ in batch)]


def halves(ops: Sequence[str], leaf: bool) -> tuple[list[Tensor | None], int]:
    """The gradients in two halves, the second two micro batches later, and how many products were deferred."""
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
    expected, (got, count) = full_backward_gradients(ops, leaf), halves(ops, leaf)
    for e, g in zip(expected, got, strict=True):
        assert (e is None) == (g is None)
        if e is not None and g is not None:
            assert (g.shape, g.dtype, g.stride()) == (e.shape, e.dtype, e.stride())
            assert (g - e).norm() <= 1e-12 * e.norm()
    storages = [g.untyped_storage()._cdata for g in got if g is not None]
    assert len(set(storages)) == len(storages)
    return count


INSIDE = {"gradient_inside", "weight_gradient_inside"}
"""A reentrant checkpoint refuses ``autograd.grad``, also in plain torch."""


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=2, max_size=6), st.booleans())
def test_two_halves_are_a_whole_backward(ops, leaf):
    assume(not ("checkpointed_reentrant" in ops and INSIDE & set(ops)))
    assert_same(ops, leaf)


PUT_OFF = {
    "linear": 1, "same_bias": 1, "without_bias": 1, "tied_head": 2, "tied_head_transposed": 2, "matrix": 1,
    "matrix_transposed": 2, "transformers_conv1d": 1, "addmm_of_activations": 1, "columns_first": 2, "skip": 1,
    "mixed": 1, "expanded": 1, "changed_in_place": 1, "detached": 1, "gradient_inside": 1, "weight_gradient_inside": 1,
    "matrix_permuted": 1, "matrix_of_itself": 1, "saved_by_hooks": 1,
}  # fmt: skip
"""The number of products that each operation defers; all others defer none."""


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_operation_used_once_or_several_times_has_the_gradients_of_a_full_backward(name):
    assert assert_same([name]) == MICROS * PUT_OFF.get(name, 0)
    assert_same([name] * 3)
    assert_same([name] * 2, leaf=False)


def test_an_input_that_changes_between_the_two_halves_is_reported():
    deferral, layer = Deferral(), torch.nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True) * 2
    with deferral.running((x,)):
        loss = layer(x).sum()
    with deferral.deferring((loss,)) as queue:
        loss.backward()
    x.detach().mul_(2)
    with pytest.raises(RunError) as caught:
        finish(queue)
    assert str(caught.value) == (
        "the input of a weight of shape (2, 3) was changed in place between the two halves of the backward, "
        "and the second half needs it (try: parallel.pipeline.scheduler=1f1b)"
    )


def rank_piece(world: World) -> tuple[int, float]:
    """The number of deferred products of a sharded weight, and the error of its gradient."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world.size,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)], run_check=False))
    x, deferral = torch.randn(5, 4, requires_grad=True), Deferral()
    for _ in range(2):
        with deferral.running((x,)):
            loss = F.linear(x, weight.to_local()).sum()
        with deferral.deferring((loss,)) as queue:
            loss.backward()
        assert isinstance(weight.grad, DTensor | None)
        finish(queue)
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    assert weight.grad.shape == weight.shape
    return len(queue), (weight.grad.to_local() - 2 * x.detach().sum(0)).abs().max().item()


def test_a_piece_of_a_weight_waits_too():
    for count, off in on_ranks(2, rank_piece):
        assert (count, off) == (1, pytest.approx(0, abs=1e-5))


def test_a_sum_may_be_wider_than_its_weight():
    """FSDP2 has such sums since torch 2.15. One product is written, the other is added."""
    weight, deferral, waiting = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)), Deferral(), []
    weight.grad_dtype = torch.float32
    inputs = [torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    for x in inputs:
        with deferral.running((x,)):
            loss = F.linear(x, weight).sum()
        with deferral.deferring((loss,)) as queue:
            loss.backward()
        waiting += queue
    for product in waiting:
        product.add()
    assert len(waiting) == 2
    ones = torch.ones(3, 2, dtype=torch.bfloat16)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, sum((ones @ x).float() for x in inputs))


def test_a_weight_whose_gradient_is_rounded_waits_too_and_one_with_other_hooks_does_not():
    counts = []
    for hook in (Rounding(torch.bfloat16), lambda grad: grad):
        weight, deferral = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16)), Deferral()
        weight.register_hook(hook)
        x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
        with deferral.running((x,)):
            loss = F.linear(x, weight).sum()
        with deferral.deferring((loss,)) as queue:
            loss.backward()
        counts.append(len(queue))
    assert counts == [1, 0]


def test_a_wider_gradient_is_rounded_to_its_weight_and_stays_wide():
    grad = Rounding(torch.bfloat16)(torch.tensor([1 + 2**-20, 3.0]))
    assert grad is not None
    assert (grad.dtype, grad.tolist()) == (torch.float32, [1.0, 3.0])


def test_a_backward_may_begin_at_an_edge_of_an_output_that_is_gone():
    weight, deferral = nn.Parameter(torch.randn(3, 4)), Deferral()
    x = torch.randn(2, 4, requires_grad=True)
    with deferral.running((x,)):
        edge = get_gradient_edge(F.linear(x, weight))
    with deferral.deferring((edge,)) as queue:
        torch.autograd.backward((edge,), torch.ones(2, 3))
    assert weight.grad is None
    (product,) = queue
    product.add()
    assert torch.equal(weight.grad, torch.ones(3, 2) @ x)
