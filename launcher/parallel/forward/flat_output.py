"""Makes the last stage of a model with several outputs return them as a flat tuple."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from launcher.parallel.stages.split import StagePart
from launcher.plan.plan import Plan


def flatten(parts: Sequence[StagePart], plan: Plan) -> None:
    """Register a hook on the last stage, which returns its tensors in the order of ``plan.output_keys``."""
    if not plan.output_keys:
        return

    def flat(module: nn.Module, args: Any, output: Any) -> tuple[Tensor, ...]:
        return tuple(output[key] for key in plan.output_keys)

    for part in parts:
        if part.stage.index == len(plan.stages) - 1:
            part.module.register_forward_hook(flat)
