"""The plan's pass counts what autograd saves, and works with torch.func."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from launcher.parallel.cost.kernels import ForwardMeter

W = torch.arange(8.0)


def slope(x: Tensor) -> Tensor:
    out: Tensor = vmap(grad(lambda row: torch.tanh(W.to(x) * row).sum()))(x)
    return out


def curve(x: Tensor) -> Tensor:
    out: Tensor = vmap(lambda row: grad(lambda r: grad(lambda s: (s**3).sum())(r).sum())(row))(x)
    return out


@pytest.mark.parametrize("func", [slope, curve], ids=["once", "twice"])
def test_torch_func_grad_runs_while_saved_tensors_are_counted(func):
    x = torch.ones(4, 8, requires_grad=True)
    with ForwardMeter(()) as meter:
        found = func(x)
    assert torch.equal(found, func(x))
    assert meter.saved >= x.nbytes


def test_saved_tensors_are_counted_again_after_torch_func_grad():
    x = torch.ones(4, 8, requires_grad=True)
    with ForwardMeter((x,)) as meter:
        slope(x)
        since = meter.saved
        x.tanh()
    assert meter.saved == since + x.nbytes


def test_hooks_of_the_users_own_are_refused_as_torch_does():
    with (
        ForwardMeter(()),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
    ):
        slope(torch.ones(4, 8))
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    slope(torch.ones(4, 8))


def test_of_two_that_count_at_once_both_step_aside_and_come_back():
    x = torch.ones(4, 8, requires_grad=True)
    with ForwardMeter(()) as outer, ForwardMeter(()) as inner:
        found = curve(x)
        since = outer.saved, inner.saved
        x.tanh()
    assert torch.equal(found, curve(x))
    assert (outer.saved > since[0]) or (inner.saved > since[1])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_result_that_its_own_backward_needs_is_freed_with_the_graph():
    x = torch.ones(4, 8, requires_grad=True)
    with ForwardMeter((x,)) as meter:
        out = x.tanh()
    alive = weakref.ref(out)
    del out
    gc.collect()
    assert (alive(), meter.saved) == (None, x.nbytes)
