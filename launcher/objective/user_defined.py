"""User-defined losses and metrics, and their trial before a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launcher.errors import Problem, RequestError, RunError
from launcher.job.schema.objective import figure
from launcher.job.schema.user_class import Target
from launcher.job.targets import build
from launcher.objective.losses import at_least_float32
from launcher.objective.losses_over_ranks import ClassShards
from launcher.objective.model_outputs import Output, each, formed, tensors
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.user_counters import MANY, integers, set_integers
from launcher.user_errors import owned

Pair = tuple[Tensor, Tensor]


class OwnLoss:
    """A user-defined loss.

    ``instance(output, target)`` returns the sum and the count, and ``instance.count(target)`` the count
    alone.
    """

    def __init__(self, settings: Target, allow: tuple[str, ...], device: torch.device) -> None:
        key = "loss._target_"
        self._name = settings.target
        self._made = made(settings, allow, key, device)
        if not callable(getattr(self._made, "count", None)):
            text = f"{self._name}: it has no method count(target); define one: the loss is divided by its"
            text += " result, which must be known before the forward"
            raise RequestError((Problem(key, text),))
        self._apart: Tensor | None = None

    def __call__(self, output: Output, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        assert parts is None, "the planner does not shard outputs for a loss of your own"
        # counted first, as for the global batch: the call may change the targets
        known = self.count(target)
        total, count = self.pair(output, target)

        # different counts make the loss NaN, because a check would wait for the GPU
        apart = (count - known).abs()
        self._apart = apart if self._apart is None else self._apart + apart
        return torch.where(apart == 0, total, torch.nan)

    def pair(self, output: Output, target: Tensor) -> Pair:
        """Returns the sum and the count of the user's instance.

        Raises ``RunError`` if it returns anything else.
        """
        return pair(self._made, output, target, self._name)

    def count(self, target: Tensor) -> Tensor:
        return number(self._made.count(target), f"{self._name}.count(target)", target)

    @property
    def instance(self) -> object:
        return self._made

    def problem(self) -> str:
        if self._apart is None or not self._apart.item():
            return ""
        return f"{self._name}: the count that it returns differs from its count(target)"


class OwnMetric:
    def __init__(self, settings: Target, allow: tuple[str, ...], device: torch.device) -> None:
        self.name = figure(settings)
        self._target = settings.target
        self._made = made(settings, allow, "metrics", device)

    def sums(self, output: Output, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        assert parts is None, "the planner does not shard outputs for a metric of your own"
        total, count = self.pair(output, target)
        return torch.stack([total.double(), count])

    def pair(self, output: Output, target: Tensor) -> Pair:
        """Returns the sum and the count, as ``OwnLoss.pair`` does."""
        return pair(self._made, output, target, self._target)

    def value(self, total: float, count: float) -> float:
        return total / count

    @property
    def instance(self) -> object:
        return self._made


def made(settings: Target, allow: tuple[str, ...], key: str, device: torch.device) -> Any:
    """Builds an instance; the buffers of a module are moved to ``device``. Raises ``RequestError``."""
    with owned(key, f"{settings.target}: cannot be built"):
        instance: Any = build(settings, allow, Callable, key=key)  # type: ignore[arg-type]
    if not isinstance(instance, nn.Module):
        return instance
    if any(True for _ in instance.parameters()):
        text = f"{settings.target}: it has parameters that would not be trained; move them into the model"
        raise RequestError((Problem(key, text),))
    return instance.to(device)


def pair(call: Callable[[Output, Tensor], object], output: Output, target: Tensor, name: str) -> Pair:
    """Returns the sum and the count that ``call`` returns, 0-d. Raises ``RunError`` for anything else.

    ``call`` gets outputs in float32 at least, and floating-point targets in the same dtype.
    """
    wide = each(output, at_least_float32)
    near = next(t for t in tensors(wide) if t.is_floating_point())
    result = call(wide, target.to(near.dtype) if target.is_floating_point() else target)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise RunError(f"{name}: it returns {type(result).__name__} where a sum and a count were expected")
    total, count = result
    if isinstance(total, Real):
        total = torch.tensor(float(total), dtype=torch.float64, device=near.device)
    if not isinstance(total, Tensor) or total.dim():
        raise RunError(f"{name}: its sum is {_kind(total)} where one number was expected; add up all samples")
    return total, number(count, f"the count of {name}", near)


def number(value: object, name: str, near: Tensor) -> Tensor:
    """Returns ``value`` as 0-d float64 on the device of ``near``.

    Raises ``RunError``, which calls the value ``name``, if it is not one number.
    """
    if isinstance(value, Tensor) and not value.dim():
        return value.detach().to(near.device, torch.float64)
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64, device=near.device)
    raise RunError(f"{name} is {_kind(value)} where one number was expected")


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


FEW = 1 << 24
"""A loss or metric is tried only if the outputs of all samples together have at most this many elements."""
SMALL = 1 << 20
"""It is tried with as many samples as a batch has only if their outputs have at most this many elements."""
CLOSE, CLOSE_FP32 = 1e-9, 1e-6
"""Relative tolerances of sums and counts: additions in another order round differently.

The second one is for float32: in fp32 training, layouts may differ by this much. A loss that rounds to fewer
bits must meet it too, because otherwise its sums would differ more between layouts.
"""
SAMPLES, TIMES = 4, 16
"""How many samples are tried, and how many times as many once more."""
MORE = 32
"""How many samples of the data these are, at most."""
UNTRAINED = "which would not be trained; move it into the model"
FAR = 20.0
"""How far the outputs of trained samples are from untrained ones."""
SCALES = (1.0, 20.0, 0.01)
"""Widths of the ranges of outputs that are tried: from 0 to 1 as drawn, the others around 0."""

Call = Callable[[Output, Tensor], tuple[Tensor, Tensor]]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Tried:
    """A loss or metric to try.

    Attributes:
        key: the setting that problems name.
        name: the class that problems name.
        call: returns a sum and a count.
        made: the specs of one sample's outputs, named by ``keys`` if the model returns several.
        targets: the targets of all samples that are tried.
        pieces: whether sequences are cut into pieces, so that sums over positions must be additive too.
        more: the targets of more samples, because some classes compare pairs of them, or those of a class.
        batches: the numbers of samples with which a run calls it.
    """

    key: str
    name: str
    call: Call
    made: tuple[TensorSpec, ...]
    targets: Tensor
    pieces: bool
    keys: tuple[str | int, ...] = ()
    more: Tensor | None = None
    batches: tuple[int, ...] = ()

    def of_size(self, n: int) -> Tried:
        """Returns the same class with the targets of ``n`` samples, repeated if there are fewer."""
        known = self.targets if self.more is None else self.more
        return replace(self, targets=torch.cat([known] * -(-n // len(known)))[:n])


def problem(tried: Tried, count: Callable[[Tensor], Tensor] | None = None) -> Problem | None:
    """Returns the problem of ``tried``, if it has one; ``count`` is the ``count(target)`` of a loss.

    Raises ``RequestError`` if it cannot be called.
    """
    n = len(tried.targets)
    if n * sum(prod(t.shape) for t in tried.made) > FEW:
        return None
    stream = torch.Generator().manual_seed(0)
    drawn = [_drawn(t, n, stream) for t in tried.made]
    wide = formed(drawn if tried.keys else drawn[0], tried.keys)

    # the outputs as a run passes them: at least float32
    dtypes = [torch.promote_types(getattr(torch, t.dtype), torch.float32) for t in tried.made]
    narrow = [t.to(d) if t.is_floating_point() else t for t, d in zip(drawn, dtypes, strict=True)]
    output = formed(narrow if tried.keys else narrow[0], tried.keys)
    shapes = [_shape(t) for t in narrow]
    arguments = f"an output of shape {shapes[0]}"
    if tried.keys:
        arguments = ", ".join(f"{key!r}: {shape}" for key, shape in zip(tried.keys, shapes, strict=True))
        arguments = f"an output of shapes {{{arguments}}}"
    refusal = f"{tried.name}: it cannot be called with {arguments}"
    with owned(tried.key, f"{refusal} and targets of shape {_shape(tried.targets)}"):
        try:
            in_run = next(_wrong(tried, output, count), None)
        except RunError as error:
            return Problem(tried.key, str(error))

    if in_run is not None:
        return in_run

    # again in float64, where rounding hides less; with outputs of other sizes and better ones, for which it
    # may take another branch; and with more samples
    trials = [(tried, partial(each, wide, partial(_sized, scale=scale))) for scale in SCALES]
    if count is not None:
        trials.append((tried, partial(_half_trained, tried, wide)))
    elements = sum(prod(t.shape) for t in tried.made)
    sizes = [TIMES * n] if TIMES * n * elements <= FEW else []
    for size in dict.fromkeys((*sizes, *(b for b in tried.batches if b * elements <= SMALL))):
        many = tried.of_size(size)
        trials.append((many, partial(_outputs, many, stream)))
    for trial, outputs in trials:
        with suppress(Exception):  # a class for float32, or for numbers from 0 to 1, may raise any error
            if (wrong := next(_wrong(trial, outputs(), count), None)) is not None:
                return wrong
    return None


def _outputs(tried: Tried, stream: torch.Generator) -> Output:
    drawn = [_drawn(t, len(tried.targets), stream) for t in tried.made]
    return formed(drawn if tried.keys else drawn[0], tried.keys)


def _half_trained(tried: Tried, output: Output) -> Output:
    """Returns outputs of which every second sample has a much smaller loss, as late in a training."""
    grads = iter(_called(tried, output, tried.targets, trains=True)[2])

    def lowered(t: Tensor) -> Tensor:
        g = next(grads) if t.is_floating_point() else None
        t = t.clone()
        if g is not None:
            steepest = g.abs().flatten(1).amax(1).clamp(min=1e-9)
            t[::2] -= FAR * (g / steepest.view(-1, *(1,) * (g.dim() - 1)))[::2]
        return t

    return each(output, lowered)


def _sized(t: Tensor, scale: float) -> Tensor:
    return (t - 0.5) * scale if t.is_floating_point() and scale != 1.0 else t


def _shape(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _drawn(made: TensorSpec, n: int, stream: torch.Generator) -> Tensor:
    """Draws outputs of ``n`` samples: float64 values in [0, 1), and integers 0 or 1."""
    shape = (n, *made.shape)
    if made.dtype.startswith(("float", "bfloat")):
        return torch.rand(shape, generator=stream, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=stream).to(getattr(torch, made.dtype))


class _Narrowed(TorchFunctionMode):
    """Notes whether a result has fewer bits than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= isinstance(out, Tensor) and out.is_floating_point() and out.dtype != torch.float64
        return out


def _wrong(tried: Tried, output: Output, count: Callable[[Tensor], Tensor] | None) -> Iterator[Problem]:
    # over all samples
    alone = None if count is None else count(tried.targets)
    streams = _streams()
    with _Narrowed() as narrowed:
        total, counted, grads = _called(tried, output, tried.targets, trains=count is not None)
    close = CLOSE_FP32 if narrowed.seen else CLOSE
    if streams != _streams():
        text = "it draws random numbers, and each layout would draw others; draw in the model or the data"
        yield Problem(tried.key, f"{tried.name}: {text}")
    if alone is not None:
        if not total.requires_grad:
            text = "its sum has no gradient: compute it from the output with torch's operations"
            yield Problem(tried.key, f"{tried.name}: {text}")
        if alone.item() != counted.item():
            text = f"it counts {counted.item():g}, but its count(target) is {alone.item():g}"
            yield Problem(tried.key, f"{tried.name}: {text}; both must be the same")

    if count is None and _overwrites(tried, output):
        text = "it changes its output or its targets in place, which the loss and other metrics use too"
        yield Problem(tried.key, f"{tried.name}: {text}; clone them first")

    # over parts of them
    ways = [("samples", 0)] + ([("positions of a sequence", 1)] if tried.pieces else [])
    for unit, dim in ways:
        if dim >= tried.targets.dim() or tried.targets.shape[dim] < 2:
            continue
        for parts in _cuts(output, tried.targets, dim):
            first, second = (_called(tried, *part, trains=count is not None) for part in parts)
            of_each = zip(("sum", "count"), (total, counted), first[:2], second[:2], strict=True)
            for of, total_value, a, b in of_each:
                once, twice = total_value.item(), a.item() + b.item()
                if abs(twice - once) > close * max(abs(twice), abs(once), abs(a.item())):
                    text = f"its {of} over all {unit} is {once:g}, but over two parts of them {twice:g}"
                    why = "a batch is cut into micro batches and over ranks, so sums and counts must add up"
                    cure = f". {NO_MEAN}" if count is None else ""
                    yield Problem(tried.key, f"{tried.name}: {text}; {why}{cure}")
            if not all(map(partial(_joined, dim=dim, close=close), grads, first[2], second[2])):
                text = f"its gradient over all {unit} differs from that over two parts of them"
                why = "a batch is cut into micro batches and over ranks, so the backward of a sample must not"
                yield Problem(tried.key, f"{tried.name}: {text}; {why} depend on the others")


def _called(tried: Tried, output: Output, target: Tensor, trains: bool) -> tuple[Tensor, Tensor, Gradients]:
    """Returns the sum, the count and the gradients of the outputs; what the class changes is a copy."""
    if not trains:
        return (*tried.call(each(output, torch.clone), target.clone()), [])
    leaves = each(output, _trained)
    total, counted = tried.call(each(leaves, torch.clone), target.clone())
    wanted = [t for t in tensors(leaves) if t.requires_grad]
    if _trains_others(total, wanted):
        raise RunError(f"{tried.name}: it has a tensor that requires a gradient, {UNTRAINED}")
    grads = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else ()
    return total, counted, [*grads]


def _overwrites(tried: Tried, output: Output) -> bool:
    """Returns true if a call changes the numbers of its arguments."""
    argument, target = each(output, torch.clone), tried.targets.clone()
    tried.call(argument, target)
    pairs = zip([*tensors(argument), target], [*tensors(output), tried.targets], strict=True)
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _trains_others(total: Tensor, wanted: list[Tensor]) -> bool:
    """Returns true if ``total`` has a gradient for a tensor that is not in ``wanted``."""
    nodes, seen = [total.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and all(leaf is not t for t in wanted):
            return True
    return False


NO_MEAN = (
    "Return the sum over samples and their number; compute a metric that is no such mean, such as F1 or AUC, "
    "from the outputs that the step predict writes"
)
IN_MODEL = "Count in a buffer of the model"


def counting_problem(tried: Tried, instance: object, cure: str = IN_MODEL) -> Problem | None:
    """Returns the problem of an ``instance`` that counts its calls, and whose sum changes after many.

    ``cure``: what to do instead.
    """
    if sum(prod(t.shape) for t in tried.made) * len(tried.targets) > FEW:
        return None
    output = _outputs(tried, torch.Generator().manual_seed(0))
    before = integers(instance)
    try:
        with suppress(Exception):  # a class for float32
            total = _called(tried, output, tried.targets, trains=False)[0]
            counters = {key: n for key, n in integers(instance).items() if before.get(key, n) != n}
            for many in MANY if counters else ():
                set_integers(instance, {key: n + many for key, n in counters.items()})
                later = _called(tried, output, tried.targets, trains=False)[0]
                if later.item() != total.item():
                    names = ", ".join(name for _, name in counters)
                    text = f"it counts its calls ({names}), and its sum changes after more of them"
                    why = "each layout calls it another number of times, and no checkpoint contains the count"
                    return Problem(tried.key, f"{tried.name}: {text}; {why}. {cure}")
    finally:
        set_integers(instance, before)
    return None


def _joined(whole: Tensor | None, a: Tensor | None, b: Tensor | None, dim: int, close: float) -> bool:
    """Returns true if the gradients of two parts are those of the whole; a missing one is zero."""
    if whole is None:
        return not any(t is not None and t.any() for t in (a, b))
    if a is None or b is None:
        return True  # a part in which nothing counts
    apart = (torch.cat([a, b], dim) - whole).abs().amax()
    return not bool(apart > close * whole.abs().amax())


def _streams() -> tuple[bytes, object, str]:
    """Returns the states of the global random streams of torch, Python and numpy."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


def _trained(t: Tensor) -> Tensor:
    return t.clone().requires_grad_() if t.is_floating_point() else t


def _cuts(output: Output, targets: Tensor, dim: int) -> Iterator[list[tuple[Output, Tensor]]]:
    """Splits ``dim`` into two parts in several ways, because one part may contain no target that counts."""
    size = targets.shape[dim]
    for first in sorted({1, size // 2, size - 1}):
        lengths = [first, size - first]
        halves = [_part(output, dim, 0, first), _part(output, dim, first, size - first)]
        yield list(zip(halves, targets.split(lengths, dim), strict=True))


def _part(output: Output, dim: int, start: int, length: int) -> Output:
    return each(output, lambda t: t.narrow(dim, start, length))
