"""Dropout whose masks are those of one process: each rank draws all of a mask and uses its part."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.torch_op import Run


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
    box = layout.box(shape, call.rank)
    part = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))

    def of_whole_mask(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if x.is_cuda:
            keep = torch.native_dropout(x.new_ones(shape), p, True)[1][part]
            out = x * keep * (1 / (1 - p))
            return (out, keep) if masked else out
        noise = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p)
        out = x * noise[part]
        return (out, noise[part] != 0) if masked else out

    return of_whole_mask
