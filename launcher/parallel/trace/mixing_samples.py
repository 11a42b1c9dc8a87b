"""Tries whether the output for a sample depends on the others of its batch, as in a contrastive loss.

Torch's batch norms, and their subclasses, are excluded: their statistics are those of each rank's micro
batch, as in any data-parallel training.
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
"""Tolerance for other dtypes.

All are relative to the largest value, as kernels may round other rows differently.
"""


class _FixedStatistics(TorchFunctionMode):
    """Makes batch norms use no statistics of the batch."""

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
    """Makes random draws constant: dropout keeps all, a permutation moves each element by one.

    ``narrowest`` is the floating-point dtype of fewest bits in the forward. ``drew``: it drew in other ways
    too.
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
    """Whether samples depend on each other, or ``None`` if the model is too large to try, draws, or fails.

    ``inputs`` are on meta; their number of samples does not matter.
    """
    large = sum(t.numel() for t in (*model.parameters(), *model.buffers())) > FEW
    if not trying() or large or not inputs or any(not x.dim() for x in inputs):
        return None
    some = [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]
    kept = put_back(files(*map(type, model.modules())))
    cpu = torch.device("cpu")

    # the user's code may raise anything for drawn values; other checks judge the forward
    with torch.random.fork_rng(devices=[]), cpu, kept, torch.enable_grad():
        for dtype in (torch.float64, torch.float32):
            with default_dtype(dtype), suppress(Exception, SystemExit):
                xs = [x.to(dtype) if x.is_floating_point() else x for x in stand_ins(some, 0)]
                return _mixing(in_memory(model).to(dtype), xs)
    return None


def _mixing(model: nn.Module, xs: list[Tensor]) -> bool | None:
    """Compare in training mode; in evaluation mode, if there are draws that cannot be fixed."""
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
    """Yield outputs of some samples, paired with those in another order, beside others, and beside fewer."""
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
    with suppress(Exception):  # it may accept no other number of samples
        yield [t[:half] for t in together], _run(model, [x[:half] for x in xs])


def _run(model: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the floating-point outputs with one row per sample; runs a copy, as a forward may count."""
    torch.manual_seed(1)
    again = copied(model)
    for module in again.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False  # its own forward may take statistics
    with _FixedStatistics():
        out = again(*(x.clone() for x in xs))
    tensors = [t.detach() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    return [t for t in tensors if t.dim() and len(t) == len(xs[0])]


def _alike(a: list[Tensor], b: list[Tensor], close: float) -> bool:
    """Whether two lists are equal up to rounding; tensors of other shapes are left to other checks."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=False) if x.shape == y.shape and x.numel()]
    return all(_close(x, y, close) for x, y in pairs)


def _close(a: Tensor, b: Tensor, close: float) -> bool:
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return True
    return bool((a - b).abs().max() <= close * torch.maximum(a.abs().max(), b.abs().max()))
