"""The training loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all positions, in nats: logits (..., classes) against class numbers (...).

    Worked out in float32 for half-precision logits, else in their own dtype.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    return F.cross_entropy(output.flatten(0, -2).to(wide), target.flatten())
