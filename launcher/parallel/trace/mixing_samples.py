"""Tries whether the output for a sample hangs on the other samples of its batch, as a contrastive loss does.

BatchNorm is known, and left out: its statistics are those of each rank's own micro batch, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch.modes import default_dtype, evaluating
from launcher.parallel.dispatch.pytree import tree_leaves
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import files, put_back
from launcher.parallel.trace.sample_values import FEW, trying
from launcher.parallel.trace.zero_inputs import in_memory, stand_ins

SAMPLES = 8
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative to the largest number: a matrix product of fewer rows may be rounded otherwise."""


class _FixedStatistics(TorchFunctionMode):
    """Batch norms take no statistics of the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):  # the first calls the second where no mode sees it
            names = ARGUMENTS[func]
            given = dict(zip(names, args, strict=False)) | kwargs
            x = given["input"]
            mean, var = given.get("running_mean"), given.get("running_var")
            given["running_mean"] = x.new_zeros(x.shape[1]) if mean is None else mean
            given["running_var"] = x.new_ones(x.shape[1]) if var is None else var
            given["training"] = False
            return func(**given) if func is F.batch_norm else func(*(given[n] for n in names))
        return func(*args, **kwargs)


ARGUMENTS = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: (
        *("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
        "cudnn_enabled",
    ),
}


def mixing(model: nn.Module, inputs: Sequence[Tensor]) -> bool | None:
    """Whether it does; ``None`` where nobody can tell: it is too large to be tried, draws, or fails.

    ``inputs``: on meta, of as many samples as they have.
    """
    large = sum(t.numel() for t in (*model.parameters(), *model.buffers())) > FEW
    if not trying() or large or not inputs or any(not x.dim() for x in inputs):
        return None
    some = [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]
    kept = put_back(files(*map(type, model.modules())))
    cpu, dtype = torch.device("cpu"), default_dtype(torch.float32)

    # whatever the user's code says of numbers that nobody promised it: the forward is judged elsewhere
    with torch.random.fork_rng(devices=[]), cpu, dtype, kept, suppress(Exception), torch.no_grad():
        return _mixing(in_memory(model), stand_ins(some, 0))
    return None


def _mixing(model: nn.Module, xs: list[Tensor]) -> bool | None:
    """In training mode; one that draws then, in evaluation mode."""
    for mode in (nullcontext(), evaluating([model])):
        with mode:
            whole = _run(model, xs, 1)
            if _alike(whole, _run(model, xs, 2)):
                return any(not _alike(*pair) for pair in _beside_others(model, xs, whole))
    return None


def _beside_others(
    model: nn.Module, xs: list[Tensor], whole: list[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """What comes of some samples, and of them in another order or beside others; as many each time."""
    places = torch.arange(SAMPLES)
    yield [t.flip(0) for t in whole], _run(model, [x.flip(0) for x in xs], 1)
    half = SAMPLES // 2
    for kept, others in (
        (places < half, places % half),
        (places >= half, places % half + half),
        *((places == one, torch.full_like(places, one)) for one in (0, SAMPLES - 1)),
        *((places != one, (places + (places == one)) % SAMPLES) for one in (0, SAMPLES - 1)),
    ):
        beside = _run(model, [x[torch.where(kept, places, others)] for x in xs], 1)
        yield [t[kept] for t in whole], [t[kept] for t in beside]


def _run(model: nn.Module, xs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The floats that it gives, each a row a sample; of a copy, for a forward may count."""
    torch.manual_seed(seed)
    with _FixedStatistics():
        out = copied(model)(*(x.clone() for x in xs))
    tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    return [t for t in tensors if t.dim() and len(t) == len(xs[0])]


def _alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """But for roundings; those of another shape are judged elsewhere."""
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x.shape == y.shape and x.numel()]
    return all(_close(x, y) for x, y in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.dtype not in CLOSE or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return True
    return bool((a - b).abs().max() <= CLOSE[a.dtype] * torch.maximum(a.abs().max(), b.abs().max()))
