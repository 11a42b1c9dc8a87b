"""Random numbers that are those of one process: each rank draws all of them and uses its part."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.torch_op import Run


def drawn(call: LocalCall, run: Run) -> Run:
    """Numbers that hang on the shape of their input only."""
    part = _part(call)

    def of_all(x: Tensor) -> Tensor:
        out: Tensor = run(x.new_empty(call.ins[0]))
        return out[part]

    return of_all


def _part(call: LocalCall) -> tuple[slice, ...]:
    """Of the first tensor, what is here."""
    box = call.strategy.takes(call.rule, 0).box(call.ins[0], call.rank)
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))


def feature_dropout(call: LocalCall, run: Run) -> Run:
    """Uses the generator just as ``F.dropout2d`` of the whole tensor does."""
    p, training = call.node.args[1:3]
    assert isinstance(p, int | float)
    if not training or not 0 < p < 1:
        return run
    count = len(call.ins[0])
    shape = (*call.ins[0][:2], *[1] * (count - 2))
    part = (*_part(call)[:2], *[slice(None)] * (count - 2))

    def of_all_channels(x: Tensor) -> Tensor:
        noise = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p)
        return x * noise[part]

    return of_all_channels


def dropout(call: LocalCall, run: Run) -> Run:
    """Uses the generator just as ``F.dropout`` of the whole contiguous tensor does.

    So does what tracing makes of it (``native_dropout``), which gives the mask too.
    """
    layout, shape = call.strategy.takes(call.rule, 0), call.ins[0]
    p, training = call.node.args[1:3]
    assert isinstance(p, int | float)
    masked = len(call.outs) > 1
    if not training or not 0 < p < 1 or not (masked or any(layout.dims)):
        return run
    part = _part(call)

    def of_whole_mask(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if x.is_cuda:
            keep = torch.native_dropout(x.new_ones(shape), p, True)[1][part]
            out = x * keep * (1 / (1 - p))
            return (out, keep) if masked else out
        noise = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p)
        out = x * noise[part]
        return (out, noise[part] != 0) if masked else out

    return of_whole_mask
