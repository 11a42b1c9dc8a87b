"""Tries whether the output for a sample depends on the others of its batch, as a contrastive loss does.

Batch norms of torch, and their subclasses, are known and left out: their statistics are those of each rank's
own micro batch, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from launcher.parallel.dispatch.modes import Dispatch, default_dtype, draws, evaluating
from launcher.parallel.dispatch.pytree import tree_leaves
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import files, put_back
from launcher.parallel.trace.sample_values import FEW, trying
from launcher.parallel.trace.zero_inputs import in_memory, stand_ins

SAMPLES = 8
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
COARSE = 3e-2
"""Relative to the largest number, by the narrowest dtype: kernels may round other rows otherwise."""


class _FixedStatistics(TorchFunctionMode):
    """Batch norms take no statistics of the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):  # the first calls the second where no mode sees it
            names = ARGUMENTS[func]
            arguments = dict(zip(names, args, strict=False)) | kwargs
            x = arguments["input"]
            mean, var = arguments.get("running_mean"), arguments.get("running_var")
            arguments["running_mean"] = x.new_zeros(x.shape[1]) if mean is None else mean
            arguments["running_var"] = x.new_ones(x.shape[1]) if var is None else var
            arguments["training"] = False
            return func(**arguments) if func is F.batch_norm else func(*(arguments[n] for n in names))
        return func(*args, **kwargs)


ARGUMENTS = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: (
        *("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
        "cudnn_enabled",
    ),
}


class _FixedDraws(Dispatch):
    """Draws are the same wherever they are made: dropout keeps all, a permutation moves each by one.

    ``narrowest``: the dtype of fewest bits that the forward computed floats in. ``drew``: it drew others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowest = torch.float64
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for t in made:
            if t.is_floating_point() and t.dtype.itemsize < self.narrowest.itemsize:
                self.narrowest = t.dtype
        if draws(func, args, kwargs or {}):
            if func._schema.name.rpartition("::")[2].rstrip("_") in NUMBERS and len(made) == 1:
                _fix(func, made[0])
            else:
                self.drew = True
        return out

    @property
    def close(self) -> float:
        return CLOSE.get(self.narrowest, COARSE)


NUMBERS = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random", "randperm", "uniform",
})  # fmt: skip
"""Operators whose result is drawn and nothing else."""


def _fix(func: Any, t: Tensor) -> None:
    name = func._schema.name.rpartition("::")[2]
    if name == "randperm":
        t.copy_(torch.arange(len(t)).roll(1))
    elif name.startswith("bernoulli"):
        t.fill_(1)
    else:
        t.fill_(0.5 if t.is_floating_point() else 0)


def mixing(model: nn.Module, inputs: Sequence[Tensor]) -> bool | None:
    """Whether it does; ``None`` where nobody can tell: it is too large to be tried, draws, or fails.

    ``inputs``: on meta, of as many samples as they have.
    """
    large = sum(t.numel() for t in (*model.parameters(), *model.buffers())) > FEW
    if not trying() or large or not inputs or any(not x.dim() for x in inputs):
        return None
    some = [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]
    kept = put_back(files(*map(type, model.modules())))
    cpu = torch.device("cpu")

    # whatever the user's code says of numbers that nobody promised it: the forward is judged elsewhere
    with torch.random.fork_rng(devices=[]), cpu, kept, torch.enable_grad():
        for dtype in (torch.float64, torch.float32):
            with default_dtype(dtype), suppress(Exception):
                xs = [x.to(dtype) if x.is_floating_point() else x for x in stand_ins(some, 0)]
                return _mixing(in_memory(model).to(dtype), xs)
    return None


def _mixing(model: nn.Module, xs: list[Tensor]) -> bool | None:
    """In training mode; one that draws what cannot be fixed, in evaluation mode."""
    for mode in (nullcontext(), evaluating([model])):
        with mode, _FixedDraws() as drawn:
            together = _run(model, xs)
            if not drawn.drew and _alike(together, _run(model, xs), drawn.close):
                pairs = _with_others(model, xs, together)
                return any(not _alike(*pair, drawn.close) for pair in pairs)
    return None


def _with_others(
    model: nn.Module, xs: list[Tensor], together: list[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The output for some samples, and for the same in another order, beside others, and beside fewer."""
    places = torch.arange(SAMPLES)
    yield [t.flip(0) for t in together], _run(model, [x.flip(0) for x in xs])
    half = SAMPLES // 2
    for kept, others in (
        (places < half, places % half),
        (places >= half, places % half + half),
        *((places == one, torch.full_like(places, one)) for one in (0, SAMPLES - 1)),
        *((places != one, (places + (places == one)) % SAMPLES) for one in (0, SAMPLES - 1)),
    ):
        beside = _run(model, [x[torch.where(kept, places, others)] for x in xs])
        yield [t[kept] for t in together], [t[kept] for t in beside]
    with suppress(Exception):  # it may take no other number of samples
        yield [t[:half] for t in together], _run(model, [x[:half] for x in xs])


def _run(model: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    """The floats that it gives, each a row a sample; of a copy, for a forward may count."""
    torch.manual_seed(1)
    again = copied(model)
    for module in again.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False  # a forward of its own takes statistics by itself
    with _FixedStatistics():
        out = again(*(x.clone() for x in xs))
    tensors = [t.detach() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    return [t for t in tensors if t.dim() and len(t) == len(xs[0])]


def _alike(a: list[Tensor], b: list[Tensor], close: float) -> bool:
    """But for roundings; those of another shape are judged elsewhere."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=False) if x.shape == y.shape and x.numel()]
    return all(_close(x, y, close) for x, y in pairs)


def _close(a: Tensor, b: Tensor, close: float) -> bool:
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return True
    return bool((a - b).abs().max() <= close * torch.maximum(a.abs().max(), b.abs().max()))
