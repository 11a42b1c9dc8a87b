"""The arguments that keep documents apart in models of transformers: positions and masks.

transformers would infer documents from positions alone, but it reads values for that, which no stage of a
pipeline can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.models.documents import attended, positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def arguments(config: PreTrainedConfig, documents: Tensor) -> dict[str, Any]:
    """Return the forward's arguments for ``documents`` (batch, time): one mask, or one per kind of layer."""
    seen = attended(documents)
    window = getattr(config, "sliding_window", None)
    near = seen if window is None else seen.triu(1 - window)
    masks = {
        "full_attention": _mask(config, seen),
        "sliding_attention": _mask(config, near),
    }
    by_layer = getattr(config, "layer_types", None) is not None
    return {
        "position_ids": positions(seen),
        "attention_mask": masks if by_layer else masks["sliding_attention"],
    }


def _mask(config: PreTrainedConfig, seen: Tensor) -> Tensor:
    """Return a mask (batch, 1, time, time); eager attention adds it to its scores, whatever their dtype."""
    mask = seen.unsqueeze(1)
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
