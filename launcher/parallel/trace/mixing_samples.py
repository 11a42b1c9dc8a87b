"""Tests whether the output or the gradient of a sample depends on the other samples of its batch.

Examples: in a contrastive loss the output does; in a custom backward that normalizes over the batch, the
gradient does. The gradient of a weight must be the sum of those of the samples: quantizers that learn their
scale divide it by the number of elements of the batch.

Torch's batch norms, and their subclasses, are excluded: their statistics are those of each rank's micro
batch, as in any data-parallel training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from launcher.parallel.dispatch.modes import Dispatch, default_dtype, draws, tree_leaves
from launcher.parallel.dispatch.training_mode import evaluating
from launcher.parallel.model_state.deep_copy import copied, hooks
from launcher.parallel.model_state.module_globals import files_of, put_back
from launcher.parallel.model_state.numbers_outside_weights import aged, values
from launcher.parallel.trace.python_streams import streams_kept, streams_now
from launcher.parallel.trace.run_module import in_memory, trial_inputs
from launcher.parallel.trace.sample_values import FEW, spread_samples, trying
from launcher.parallel.trace.tensor_side_effects import FRESH

SAMPLES = 8
WORK = 1 << 30
"""A forward of a larger batch may multiply this many numbers: its inputs' elements times the model's."""
REPEATS = 5
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
COARSE = 3e-2
"""The tolerance for other dtypes, in models whose tensors cannot all be widened.

All tolerances are relative to the largest value, because kernels may round other rows differently.
"""
STEP = 0.02
"""Weights are moved by this much, because a weight that starts at zero hides all that it multiplies."""
LARGER = 3.0
"""Weights become so much larger for another try: some bounds are passed by large numbers only."""
ROUGHER = 10
"""A gradient may differ by this factor more than an output, because it passes twice as many operations."""
UNUSUAL = 4
"""So many of the samples from all over the data are also tried alone. The unusual samples come first."""
NO_GRADIENT = 1e-3
"""A gradient below this part of the largest may be rounding, such as that of a bias before a softmax.

In narrow dtypes, any gradient that is smaller than the largest may be rounding.
"""
OUTPUT, GRADIENT, WEIGHT = "its output for a sample", "the gradient of a sample", "the gradient of a weight"
"""What depends on the other samples."""


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


class FixedDraws(Dispatch):
    """Makes random draws constant: dropout keeps all, a permutation moves each element by one.

    ``wide``: use float64 for all narrower dtypes that the forward requests: their rounding could hide that
    samples depend on one another. ``narrowest`` is the narrowest floating-point dtype that remains in the
    forward. ``drew``: the forward also drew in other ways.
    """

    def __init__(self, wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide = wide
        self.narrowest = torch.float64
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.wide:
            kwargs = {k: _widened(v) for k, v in (kwargs or {}).items()}
        out = func(*args, **(kwargs or {}))
        if self.wide and func is FRESH:  # a new torch.tensor
            out = out.to(_widened(out.dtype))
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


def _widened(value: Any) -> Any:
    """Returns the widest dtype of the same kind, or any other value as it is."""
    if not isinstance(value, torch.dtype):
        return value
    if value.is_complex:
        return torch.complex128
    return torch.float64 if value.is_floating_point else value


NUMBERS = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random", "randperm", "uniform",
})  # fmt: skip
"""Operators whose result consists of random numbers only."""


def _fix(func: Any, t: Tensor) -> None:
    name = func._schema.name.rpartition("::")[2]
    if name == "randperm":
        t.copy_(torch.arange(len(t)).roll(1))
    elif name.startswith("bernoulli"):
        t.fill_(1)
    else:
        t.fill_(0.5 if t.is_floating_point() else 0)


def numbers_if_too_large(model: nn.Module) -> int:
    """Returns the number of elements of a model that is too large to try, else 0.

    A try computes in float64 with two copies of the model, which take 256 MB for ``FEW`` elements. It runs
    about 20 forwards of 8 samples, and 6 more with their backwards if the model has its own backward. If the
    model counts its forwards, all of this runs again for each of ``AGES``.
    """
    numbers = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    return numbers if numbers > FEW else 0


def mixing(model: nn.Module, inputs: Sequence[Tensor], batch_size: int = SAMPLES) -> str | None:
    """Returns which value of a sample depends on the others: ``OUTPUT``, ``GRADIENT``, ``WEIGHT`` or "".

    ``None`` if the model is too large to try, or fails. ``inputs`` are on meta; their number of samples does
    not matter. The first samples are tried, and then up to ``batch_size`` from all over the data: a loss that
    keeps the hardest ten needs more than ten, and the first samples may all be of one class.
    """
    if not trying() or numbers_if_too_large(model) or not inputs or any(not x.dim() for x in inputs):
        return None
    first = _tried(model, inputs, SAMPLES, brief=False)
    count = min(batch_size, _most_samples(model, inputs))
    if first or count <= 1:
        return first
    with spread_samples(count) as known:
        spread = _tried(model, inputs, count, brief=True) if known or count > SAMPLES else None
    return first if spread is None else spread


def _most_samples(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Returns how many samples a forward may have, so that it takes less than a second."""
    numbers = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    return WORK // max(numbers * sum(x[:1].numel() for x in inputs), 1)


def _tried(model: nn.Module, inputs: Sequence[Tensor], count: int, brief: bool) -> str | None:
    """Returns what ``mixing`` does, for ``count`` samples; ``brief``: with few forwards."""
    some = [torch.empty((count, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]
    kept = put_back(files_of(model))
    cpu = torch.device("cpu")

    # the user's code may raise anything for drawn values; other checks judge the forward
    with torch.random.fork_rng(devices=[]), streams_kept(), cpu, kept, torch.enable_grad():
        for dtype, wide, move in TRIES:
            with default_dtype(dtype), suppress(Exception, SystemExit):
                xs = [x.to(dtype) if x.is_floating_point() else x for x in trial_inputs(some, 0)]
                real = in_memory(model, parameter_hooks=True).to(dtype)
                if move:
                    _move(real)
                return _mixing(real, xs, wide, brief)
    return None


TRIES = (
    (torch.float64, True, True), (torch.float64, True, False), (torch.float64, False, False),
    (torch.float32, False, False),
)  # fmt: skip
"""Settings to try in order until the model runs: default dtype, widen narrower dtypes, move weights."""


@torch.no_grad()
def _move(model: nn.Module) -> None:
    """Moves the weights a little, as training does."""
    stream = torch.Generator().manual_seed(4)
    for p in model.parameters():
        if p.requires_grad and p.is_floating_point():
            p.add_(torch.randn(p.shape, generator=stream).to(p.dtype), alpha=STEP)


def _mixing(model: nn.Module, xs: list[Tensor], wide: bool, brief: bool) -> str | None:
    """Compares in training mode, or in evaluation mode if two equal forwards differ in training mode.

    Raises ``ArithmeticError`` if no output is a number.
    """
    for mode in (nullcontext(), evaluating([model])):
        with mode, FixedDraws(wide) as drawn:
            mixed = _compare(model, xs, drawn, brief)
            if mixed == "" and not brief:
                return _in_extremes(model, xs, drawn) or _later(model, xs, drawn)
            if mixed is not None:
                return mixed
    return None


def _in_extremes(model: nn.Module, xs: list[Tensor], drawn: FixedDraws) -> str:
    """Returns what ``mixing`` does, for samples that mix only in some batches, or with other weights.

    An expert with much room is full only if most tokens choose it, as equal tokens do. A bound on a number
    of the whole batch is passed only by large numbers.
    """
    for larger, inputs in ((1.0, [_one_position(x) for x in xs]), (LARGER, xs)):
        with suppress(Exception):  # the model's code may not allow such inputs
            if _differ_in(_scaled(model, larger), inputs, drawn):
                return OUTPUT
    return ""


def _differ_in(model: nn.Module, xs: list[Tensor], drawn: FixedDraws) -> bool:
    """Returns true if a sample's output differs beside others, and no rounding explains it.

    A recurrent model with large weights can be chaotic: it turns the rounding of another kernel into
    anything. So weights that are rounded differently must give the same output.
    """
    before, half = _seed(), len(xs[0]) // 2
    together = run(model, xs)
    by_row = drawn.drew or streams_now() != before
    row = slice(1) if drawn.drew else slice(-1, None)  # draws for other rows come first, and may be fewer
    beside = _seeded(model, [x[row].expand_as(x) for x in xs])
    pairs = [([t[row] for t in together], [t[row] for t in beside])]
    with suppress(Exception):  # it may accept no other number of samples
        if not by_row:
            pairs.append(([t[:half] for t in together], run(model, [x[:half] for x in xs])))
    if all(alike(*pair, drawn.close) for pair in pairs):
        return False
    return alike(together, _seeded(_rounded_otherwise(model), xs), drawn.close / ROUGHER)


def _one_position(x: Tensor) -> Tensor:
    """Returns samples whose positions (of images: pixels) all have the values of their first position."""
    if x.dim() < 2:
        return x
    return (x[..., :1, :1] if x.dim() > 3 else x[:, :1]).expand_as(x).contiguous()


@torch.no_grad()
def _scaled(model: nn.Module, larger: float) -> nn.Module:
    """Returns a copy of the model whose trained weights are larger."""
    again = copied(model)
    for p in again.parameters():
        if p.requires_grad and p.is_floating_point():
            p.mul_(larger)
    return again


@torch.no_grad()
def _rounded_otherwise(model: nn.Module) -> nn.Module:
    """Returns a copy of the model whose weights differ by a few units in the last place."""
    again, stream = copied(model), torch.Generator().manual_seed(5)
    with _disable_current_modes():  # FixedDraws would make the draws constant
        for p in again.parameters():
            if p.is_floating_point():
                p.mul_(1 + 8 * torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=stream).to(p.dtype))
    return again


def _later(model: nn.Module, xs: list[Tensor], drawn: FixedDraws) -> str:
    """Returns what ``mixing`` does, for samples that mix only after many forwards."""
    for older in _older(model, xs):
        with suppress(Exception):  # the model's code may not allow so many forwards
            mixed = "" if _remembers(older, xs) else _compare(older, xs, drawn, brief=False)
            if mixed:
                return mixed
    return ""


def _remembers(model: nn.Module, xs: Sequence[Tensor]) -> bool:
    """Returns true if a forward stores tensors that depend on its samples; another check judges these."""
    first = [x[torch.zeros(len(x), dtype=torch.int64)] for x in xs]
    left = []
    for inputs in (xs, first):
        torch.manual_seed(1)
        again = _with_fixed_norms(model)
        with torch.no_grad(), _FixedStatistics():
            again(*(x.clone() for x in inputs))
        left.append([t.detach() for t in (*again.parameters(), *again.buffers())])
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*left, strict=True))


def _compare(model: nn.Module, xs: list[Tensor], drawn: FixedDraws, brief: bool) -> str | None:
    """Returns which value of a sample depends on the others; ``None`` if equal forwards differ.

    All random streams have the same seeds for each forward, so a draw is no difference. It may be for one
    row, so then rows keep their places. A value that is not finite beside some samples must not be finite
    beside others either: a loss over a class that occurs once divides by zero.
    """
    before = _seed()
    together = run(model, xs)
    by_row = streams_now() != before
    if together and all(bool(torch.isnan(t).all()) for t in together):
        raise ArithmeticError("not a number")
    if not _same(together, _seeded(model, xs), drawn.close):
        return None
    pairs = _with_others(model, xs, together, _Kept(len(xs[0]), by_row, drawn.drew, brief))
    if any(not _same(*pair, drawn.close) for pair in pairs):
        # a clock or an address may have given the same results by chance
        again = (_seeded(model, xs) for _ in range(REPEATS))
        return OUTPUT if all(_same(together, more, drawn.close) for more in again) else None
    with suppress(Exception):  # it may have no backward, or none for such inputs
        if not brief and _own_backward(model, xs):
            if _backward_mixes(model, xs, drawn):
                return GRADIENT
            if not by_row and not _weights_add_up(model, xs, drawn):
                return WEIGHT
    return ""


def _older(model: nn.Module, xs: Sequence[Tensor]) -> Iterator[nn.Module]:
    """Yields copies of a model that counts its forwards or backwards, in the state after many of them."""
    one, names = _with_fixed_norms(model), files_of(model)
    seen = []
    with suppress(Exception):  # the second time it may fail for the same samples
        for _ in range(2):
            _pass(one, xs)
            seen.append(values(one, names))
    if len(seen) == 2:
        yield from (older for _, older in aged(one, names, *seen))


def _pass(model: nn.Module, xs: Sequence[Tensor]) -> None:
    """Runs a forward, and a backward that leaves no gradients behind."""
    torch.manual_seed(1)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
    with _FixedStatistics():
        made = tree_leaves(model(*(x.clone() for x in inputs)))
        ends = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
        learning = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
        if ends and learning:
            torch.autograd.grad(ends, learning, [torch.ones_like(t) for t in ends], allow_unused=True)


class _Sources(TorchFunctionMode):
    """Finds where gradients of samples end: float inputs, and tensors computed from inputs and weights only.

    ``sources`` has them in the order of the forward; each has a row per sample, or seems to. ``weights``:
    those that are trained. ``hooked``: whether a tensor has a hook; ``stopped``: whether a float tensor
    passes no gradients back, as after ``detach``.
    """

    def __init__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = [p for p in weights if p.requires_grad and p.numel()]
        self._samples = len(inputs[0])
        self._of_data = {id(t): t for t in inputs}
        self.sources = [t for t in inputs if t.requires_grad]
        self.hooked = self.stopped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hooked |= func is Tensor.register_hook
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(t.requires_grad for t in given):
            self.stopped |= any(t.is_floating_point() and not t.requires_grad for t in made)
        read = [t for t in given if id(t) in self._of_data]
        if not read:
            return out
        first = not any(map(self._has_gradients, read))
        for t in made:
            if id(t) not in self._of_data:
                self._of_data[id(t)] = t
                if first and self._has_gradients(t):
                    self.sources.append(t)
        return out

    def _has_gradients(self, t: Tensor) -> bool:
        return t.requires_grad and t.dim() > 0 and len(t) == self._samples


def _own_backward(model: nn.Module, xs: Sequence[Tensor]) -> bool:
    """Returns true unless the backward is torch's own, which mixes samples no more than the forward does."""
    if any(map(hooks, model.parameters())):
        return True
    sources, out = _forward(model, xs)
    waiting, seen = [t.grad_fn for t in out], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # also of a module's hooks
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return sources.hooked or sources.stopped


Rows = list[tuple[Tensor, Tensor]]
"""Each source of samples, and its gradient."""


def _backward_mixes(model: nn.Module, xs: list[Tensor], drawn: FixedDraws) -> bool:
    """Returns true if the gradient of a sample depends on other samples, their gradients or the batch size.

    Each sample's output has its own gradient, which moves to another row with the sample.
    """
    places, close = torch.arange(SAMPLES), drawn.close * ROUGHER
    together, again = _gradients(model, xs, places), _gradients(model, xs, places)
    turned = _gradients(model, xs, places.flip(0))
    steady = all(_close(a[1], b[1], close) for a, b in zip(together, again, strict=True))
    if drawn.drew or not steady:
        return False

    # rows that are not those of samples do not turn with them
    ours = [
        n
        for n, ((a, _), (b, _)) in enumerate(zip(together, turned, strict=True))
        if a.shape == b.shape and not _close(a, a.flip(0), close) and _close(a.flip(0), b, close)
    ]

    def differ(kept: Tensor, at: Tensor, other: Rows) -> bool:
        """Returns true if the rows ``kept`` of ``other`` differ from those of the samples ``at``."""
        pairs = [(together[n][1][at], other[n][1][kept]) for n in ours]
        return any(a.shape == b.shape and not _close(a.double(), b.double(), close) for a, b in pairs)

    half = SAMPLES // 2
    first = places[:half]
    if differ(places, places.flip(0), turned):
        return True
    if any(differ(kept, kept, _gradients(model, xs, beside)) for kept, beside in (
        (first, places % half),
        (places[:1], torch.zeros_like(places)),
    )):  # fmt: skip
        return True
    with suppress(Exception):  # it may accept no other number of samples
        return differ(first, first, _gradients(model, xs, first))
    return False


def _weights_add_up(model: nn.Module, xs: list[Tensor], drawn: FixedDraws) -> bool:
    """Returns true if two halves of the batch accumulate the same gradients of weights as the batch at once.

    Micro batches accumulate gradients in this way. The halves may cancel, so the largest of a weight's three
    gradients bounds the rounding. A gradient may be nothing but rounding, so other weights' bound it too.
    """
    places, close = torch.arange(SAMPLES), drawn.close * ROUGHER
    at_once, again = (_weight_gradients(model, xs, places) for _ in range(2))
    if drawn.drew or not all(_close(a, b, close) for a, b in zip(at_once, again, strict=True)):
        return True
    first, second = places.chunk(2)
    half = _weight_gradients(model, xs, first)
    summed = _weight_gradients(model, xs, second, half)
    least = max((float(t.abs().max()) for t in at_once), default=0.0)
    least *= NO_GRADIENT if drawn.narrowest in CLOSE else 1
    for grads in zip(at_once, half, summed, strict=True):
        largest = max(least, *(float(t.abs().max()) for t in grads))
        off = (grads[0] - grads[2]).abs().max()
        if bool(off.isfinite()) and off > close * largest:
            return False
    return True


def _weight_gradients(
    model: nn.Module, xs: Sequence[Tensor], places: Tensor, before: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Returns the gradients of all trained weights for the samples at ``places``, after hooks on weights.

    ``before``: gradients of earlier samples, to which these are added.
    """
    sources, out = _forward(model, [x[places] for x in xs], parameter_hooks=True)
    if not out or not sources.weights:
        return []
    for p, grad in zip(sources.weights, before, strict=False):
        p.grad = grad.clone() if p.grad is None else p.grad + grad  # a forward may call backward itself
    with _FixedStatistics():
        torch.autograd.backward(out, _seeds(out, places), inputs=sources.weights)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in sources.weights]


def _gradients(model: nn.Module, xs: Sequence[Tensor], places: Tensor) -> Rows:
    """Returns the sources of the samples at ``places``, and their gradients."""
    sources, out = _forward(model, [x[places] for x in xs])
    if not out or not sources.sources:
        return []
    with _FixedStatistics():  # for forwards that are recomputed
        grads = torch.autograd.grad(out, sources.sources, _seeds(out, places), allow_unused=True)
    return [
        (t.detach(), torch.zeros_like(t) if g is None else g)
        for t, g in zip(sources.sources, grads, strict=True)
    ]


def _seeds(out: Sequence[Tensor], places: Tensor) -> list[Tensor]:
    """Returns a gradient for each output; each of the samples at ``places`` has its own."""
    return [_drawn(t.shape[1:])[places].to(t.dtype) for t in out]


def _seed() -> tuple[Any, ...]:
    """Seeds Python's and numpy's streams, and returns their states."""
    random.seed(1)
    np.random.seed(1)
    return streams_now()


def _seeded(model: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    _seed()
    return run(model, xs)


@dataclass(frozen=True)
class _Kept:
    """Which of ``count`` samples keep their rows, while others are replaced.

    ``by_row``: rows keep their places and their number, because Python draws for them. ``drawn``: the same
    for torch's draws; an operator may draw once more for another row, and all rows after that one then get
    other numbers. ``brief``: only halves, and the first samples alone.
    """

    count: int
    by_row: bool
    drawn: bool
    brief: bool

    @property
    def in_place(self) -> bool:
        return self.by_row or self.drawn

    def choices(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields a mask of the rows that are kept, and the samples for the other rows."""
        places, half, last = torch.arange(self.count), self.count // 2, self.count - 1
        yield places < half, places % half
        if not self.drawn:
            yield places >= half, places % half + half
        alone = range(max(1, min(UNUSUAL, half))) if self.brief else (0, last)
        for one in (0,) if self.drawn else alone:
            yield places == one, torch.full_like(places, one)
        for one in () if self.brief else (last,) if self.drawn else (0, last):
            yield places != one, (places + (places == one)) % self.count


def _with_others(
    model: nn.Module, xs: list[Tensor], together: list[Tensor], kept: _Kept
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yields outputs of samples, paired with those of the same samples in another order or batch."""
    if not kept.in_place:
        yield [t.flip(0) for t in together], run(model, [x.flip(0) for x in xs])
    for rows, others in kept.choices():
        places = torch.arange(kept.count)
        beside = _seeded(model, [x[torch.where(rows, places, others)] for x in xs])
        yield [t[rows] for t in together], [t[rows] for t in beside]
    if kept.in_place:
        return
    half = kept.count // 2
    with suppress(Exception):  # it may accept no other number of samples
        yield [t[:half] for t in together], run(model, [x[:half] for x in xs])


def run(model: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the floating-point outputs with one row per sample; runs a copy, as a forward may count."""
    torch.manual_seed(1)
    again = _with_fixed_norms(model)
    with _FixedStatistics():
        out = again(*(x.clone() for x in xs))
    tensors = [t.detach() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    return [t for t in tensors if t.dim() and len(t) == len(xs[0])]


def _forward(
    model: nn.Module, xs: Sequence[Tensor], parameter_hooks: bool = False
) -> tuple[_Sources, list[Tensor]]:
    """Returns the sources of a forward, and its outputs with gradients; runs a copy, as ``run`` does."""
    torch.manual_seed(1)
    again = _with_fixed_norms(model, parameter_hooks)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
    with _FixedStatistics(), _Sources(inputs, [*again.parameters()]) as sources:
        made = tree_leaves(again(*(x.clone() for x in inputs)))
    out = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
    return sources, [t for t in out if t.dim() and len(t) == len(xs[0])]


def _drawn(shape: torch.Size) -> Tensor:
    """Returns a gradient for each sample, the same in every call."""
    with _disable_current_modes():  # FixedDraws would make the draws constant
        return torch.randn((SAMPLES, *shape), generator=torch.Generator().manual_seed(2))


def _with_fixed_norms(model: nn.Module, parameter_hooks: bool = False) -> nn.Module:
    again = copied(model, parameter_hooks)
    for module in again.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False  # its own forward may use the batch's statistics
    return again


def alike(a: list[Tensor], b: list[Tensor], close: float) -> bool:
    """Returns true if two lists are equal up to rounding; other checks compare shapes."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=False) if x.shape == y.shape and x.numel()]
    return all(_close(x, y, close) for x, y in pairs)


def _same(a: list[Tensor], b: list[Tensor], close: float) -> bool:
    """Returns true if two lists are ``alike``, and what is not finite in one is not finite in the other."""
    for x, y in zip(a, b, strict=False):
        if x.shape == y.shape and not x.isfinite().equal(y.isfinite()):
            return False
    finite = [[t.nan_to_num(0, 0, 0) for t in some] for some in (a, b)]
    return alike(finite[0], finite[1], close)


def _close(a: Tensor, b: Tensor, close: float) -> bool:
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return True
    return bool((a - b).abs().max() <= close * torch.maximum(a.abs().max(), b.abs().max()))
