"""Operators whose real kernels take tensors of one dtype only, which the meta device does not check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from launcher.parallel.dispatch import source_lines

ONE = {
    "mm": (0, 1), "addmm": (0, 1, 2), "mv": (0, 1), "addmv": (0, 1, 2), "convolution": (0, 1, 2),
    "index_add": (0, 3), "index_copy": (0, 3), "index_put": (0, 2), "nll_loss_forward": (0, 2),
    "nll_loss2d_forward": (0, 2), "binary_cross_entropy": (0, 1, 2), "_cdist_forward": (0, 1),
    "grid_sampler_2d": (0, 1), "grid_sampler_3d": (0, 1), "_embedding_bag": (0, 6),
    "_embedding_bag_forward_only": (0, 6),
}  # fmt: skip
"""The positions of the arguments that must have one dtype."""

NORMS = {"native_layer_norm": (0, 2, 3), "native_group_norm": (0, 1, 2), "native_batch_norm": (0, 1, 2)}
"""The same for norms, whose input may be narrower than their parameters."""

NARROW = (torch.float16, torch.bfloat16)


def disagreement(func: Any, args: Sequence[Any]) -> str:
    """Return what a real kernel of ``func`` would refuse, and the line of the user's code; "" for nothing."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    at = ONE.get(name) or NORMS.get(name)
    if at is None:
        return ""

    # the dtypes of its arguments; parameters of a norm may be wider than its input
    found = [args[i].dtype for i in at if i < len(args) and isinstance(args[i], torch.Tensor)]
    if name in NORMS and found[0] in NARROW:
        found = found[1:]
    if len(set(found)) < 2 or _autocast():
        return ""

    both = " and ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(found))
    text = f"{name.removeprefix('_')} of {both}"
    where = source_lines.of_now()
    return f"{text} ({where})" if where else text


def _autocast() -> bool:
    """Whether autocast is on around the operation, which runs below it: only the nesting depth shows it."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())
