"""Random operators that draw as one process does: each rank draws all values and uses its part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.torch_op import Run


def dropout(call: LocalCall, run: Run) -> Run:
    """Use the generator as ``F.dropout`` of the full tensor does.

    The traced form (``native_dropout``), which also returns the mask, does so too.
    """
    p, training = call.node.args[1:3]
    assert isinstance(p, int | float)
    masked = len(call.outs) > 1
    if not training or not 0 < p < 1 or not (masked or any(call.strategy.takes(call.rule, 0).dims)):
        return run
    part, whole = _part(call), _whole(call)

    def of_whole_mask(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if x.device.type != "cpu":  # accelerators have another kernel, with other draws
            keep = torch.native_dropout(whole(x).fill_(1), p, True)[1][part]
            out = x * keep * (1 / (1 - p))
            return (out, keep) if masked else out
        noise = whole(x).bernoulli_(1 - p).div_(1 - p)[part]
        out = x * noise
        return (out, noise != 0) if masked else out

    return of_whole_mask


def feature_dropout(call: LocalCall, run: Run) -> Run:
    """Use the generator as ``F.dropout2d`` of the full tensor does, with one number per channel."""
    p, training = call.node.args[1:3]
    assert isinstance(p, int | float)
    if not training or not 0 < p < 1:
        return run
    places = len(call.ins[0]) - 2
    shape = (*call.ins[0][:2], *[1] * places)
    part = (*_part(call)[:2], *[slice(None)] * places)

    def of_all_channels(x: Tensor) -> Tensor:
        noise = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p)
        return x * noise[part]

    return of_all_channels


def drawn(call: LocalCall, run: Run) -> Run:
    """Draw values that depend on their input's shape and strides only."""
    part, whole = _part(call), _whole(call)

    def of_all(x: Tensor) -> Tensor:
        out: Tensor = run(whole(x))
        return out[part]

    return of_all


def _part(call: LocalCall) -> tuple[slice, ...]:
    """Return this rank's slices of the first tensor."""
    box = call.strategy.takes(call.rule, 0).box(call.ins[0], call.rank)
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))


def _whole(call: LocalCall) -> Callable[[Tensor], Tensor]:
    """Return a function that allocates the full first tensor; values are drawn in the order of memory."""
    shape = call.ins[0]
    strides = call.strides or torch.empty(shape, device="meta").stride()
    dense = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return lambda x: torch.empty_strided(shape, dense, dtype=x.dtype, device=x.device)
