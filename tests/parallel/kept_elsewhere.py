"""A function that counts its calls in variables of its file."""

from __future__ import annotations

import torch

CALLS = 0
TENSOR = torch.zeros(())


def calls(step: float) -> float:
    global CALLS
    CALLS += 1
    TENSOR.add_(1)
    return 1 + step * CALLS
