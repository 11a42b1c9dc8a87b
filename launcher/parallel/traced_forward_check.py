"""Compares a traced forward with the model's own, on a few samples.

A trace sees the code between the modules while torch's modes are active, on tensors without values. Code that
asks for that takes another path, which the stages would then run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn

from launcher.parallel.dispatch.modes import default_dtype, tree_leaves
from launcher.parallel.model_state.module_globals import files_of, put_back
from launcher.parallel.stages import unsplit
from launcher.parallel.trace.clock_and_host_reads import streams_kept
from launcher.parallel.trace.code_between_modules import RUNNING, Tracer, follow
from launcher.parallel.trace.mixing_samples import numbers_if_too_large
from launcher.parallel.trace.run_on_values import in_memory, stand_ins
from launcher.parallel.trace.sample_values import trying

SAMPLES = 2
CLOSE = 1e-9


def differs(model: nn.Module, leaves: frozenset[str], inputs: Sequence[Tensor]) -> str:
    """Return how the traced forward differs from the model's own: a result or an error; "" for no difference.

    ``inputs`` are on meta; their number of samples does not matter. Nothing is compared for a model that is
    too large to try, whose equal forwards differ, or that itself fails for the values tried.
    """
    if not trying() or numbers_if_too_large(model) or any(not x.dim() for x in inputs):
        return ""
    some = [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]

    # the user's code may raise anything for drawn values; other checks judge the forward
    around = torch.random.fork_rng(devices=[]), streams_kept(), put_back(files_of(model)), torch.enable_grad()
    with ExitStack() as stack, suppress(Exception, SystemExit):
        for each in around:
            stack.enter_context(each)
        tracer = follow(model, leaves, some)
        stack.enter_context(default_dtype(RUNNING))  # as on ranks: draws depend on it
        xs = [x.double() if x.is_floating_point() else x for x in stand_ins(some, 0)]
        own, again = (_results(model, xs, None) for _ in range(2))
        if _first_difference(own, again):
            return ""
        try:
            traced = _results(model, xs, tracer)
        except Exception as error:
            return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        name = _first_difference(own, traced)
        return f"{name} differs" if name else ""
    return ""


def _results(model: nn.Module, xs: Sequence[Tensor], tracer: Tracer | None) -> dict[str, Tensor]:
    """Return the outputs and gradients of a copy of ``model``, or of its traced forward."""
    with put_back(files_of(model)), streams_kept():
        torch.manual_seed(1)
        real = in_memory(model).double()
        run = real if tracer is None else unsplit(real, tracer)
        made = [t for t in tree_leaves(run(*(x.clone() for x in xs))) if isinstance(t, Tensor)]
        out = {f"output {n}": t.detach() for n, t in enumerate(made)}
        ends = [t for t in made if t.requires_grad]
        torch.autograd.backward(ends, [torch.linspace(1, 2, t.numel()).view(t.shape).to(t) for t in ends])
        grads = {name: p.grad for name, p in real.named_parameters() if p.grad is not None}
        return out | {f"the gradient of {name}": g for name, g in grads.items()}


def _first_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    for name in (*a, *b):
        if name not in a or name not in b or not _close(a[name], b[name]):
            return name
    return ""


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    return torch.allclose(a.to_dense(), b.to_dense(), rtol=CLOSE, atol=CLOSE, equal_nan=True)
