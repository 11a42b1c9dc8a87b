"""Runs modules on meta tensors.

A module that reads values or uses autocast runs in memory instead, on samples of the data or on zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from launcher.errors import RequestError
from launcher.parallel.cost.kernels import ForwardMeter
from launcher.parallel.dispatch.containers import mapped, tensors
from launcher.parallel.dispatch.modes import tree_map_only
from launcher.parallel.model_state.deep_copy import copied, hooks, keep
from launcher.parallel.model_state.references import held_modules
from launcher.parallel.trace.forward_observer import ForwardObserver
from launcher.parallel.trace.graph_recorder import Uncuttable
from launcher.parallel.trace.sample_values import FEW, SampleValues, initial, trying
from launcher.parallel.trace.tensor_side_effects import StateEffects

Made = dict[int, torch.Tensor]
"""Tensors in memory by the ids of the tensors that they stand for."""


def cast(func: Any, args: Any, kwargs: Any, watch: ForwardObserver) -> Any:
    """Runs one call under autocast on values in memory, because autocast does nothing on meta tensors."""
    arguments = tensors((args, kwargs))
    with torch.device("cpu"):
        made = _stand_ins(arguments, watch)
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu"), (args, kwargs))
        out = func(*args, **kwargs)
    return _returned(out, arguments, made, watch.effects)


def _stand_ins(arguments: list[torch.Tensor], watch: ForwardObserver | None, zeros: bool = False) -> Made:
    """Maps the id of each argument to a tensor in memory with its values, random values, or zeros."""
    stream = torch.Generator().manual_seed(0)
    made = {}
    for t in arguments:
        value = None if watch is None or zeros else watch.values.of(t)
        if value is None and trying() and not zeros and t.is_floating_point() and t.numel() <= FEW:
            with _unseen():  # no draw of the model's
                value = torch.randn(t.shape, generator=stream).to(t.dtype)
        made[id(t)] = _zeros(t) if value is None else _as(value, t)
        if watch is not None:
            watch.effects.follow(made[id(t)], t)
            watch.values.follow(made[id(t)], t)
    return made


def _as(value: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Returns ``value``, as a non-leaf if ``t`` needs a gradient, so that it may be changed in place."""
    return value.requires_grad_().clone() if t.requires_grad else value


def _returned(out: Any, arguments: list[torch.Tensor], made: Made, effects: StateEffects | None) -> Any:
    """Returns ``out`` on meta again; stand-ins in it become the ``arguments``, and gradients flow to these.

    Each meta tensor is recorded to depend on the state that its tensor in memory depends on. This includes
    arguments that were changed in place.
    """
    back = {id(made[id(t)]): t for t in arguments}
    fresh = {id(t): t for t in tensors(out) if id(t) not in back}
    specs = [(t.shape, t.dtype, t.requires_grad) for t in fresh.values()]
    with torch.device("meta"):
        metas = _Opaque.apply(specs, torch.empty((), requires_grad=True), *arguments)  # type: ignore[no-untyped-call]
    back |= dict(zip(fresh, metas, strict=True))
    if effects is not None:
        stand_ins = {id(t): t for t in made.values()} | fresh
        for key, t in back.items():
            effects.follow(t, stand_ins[key])
    return mapped(out, lambda t: back[id(t)])


class _Opaque(torch.autograd.Function):
    """Makes meta tensors for the results of a call that ran elsewhere."""

    @staticmethod
    def forward(ctx: Any, specs: Any, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in specs)
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(out, specs, strict=True) if not grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("a plan has no backward")


def _zeros(t: torch.Tensor) -> torch.Tensor:
    return _as(torch.zeros_like(t, device="cpu"), t)


@dataclass(frozen=True)
class Observers:
    """The observers of a module's run.

    ``report`` is called with each part of the result that depends on values and that Python can see.
    """

    meter: ForwardMeter | None = None
    watch: ForwardObserver | None = None
    report: Callable[[str], None] | None = None

    def mark(self, effects: bool = True) -> Callable[[], None]:
        """Returns a function that drops all later records, except effects if ``effects`` is false."""
        undo = []
        if self.meter is not None:
            undo.append(self.meter.mark())
        if self.watch is not None:
            undo.append(self.watch.mark(effects=effects))

        def back() -> None:
            for each in undo:
                each()

        return back


def run_module(
    module: nn.Module, args: Any, kwargs: Any, seen: Observers = Observers(), on_zeros: bool = False
) -> Any:
    """Runs a module on meta tensors, or alone on values in memory if its Python reads them.

    The values are the first samples of the data and the constructor's weights; random values replace those
    that are unknown. If the module fails on them, it runs on zeros. The observers drop records of failed
    tries. ``on_zeros``: run in memory on zeros at once.
    """
    if not on_zeros:
        back = seen.mark()
        try:
            return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as refused:
            if not needs_values(refused):
                raise
        back()
    if not trying():
        return _in_memory(module, args, kwargs, seen, on_zeros=True)

    back = seen.mark()
    try:
        return _in_memory(module, args, kwargs, seen)
    except (RequestError, Uncuttable):
        raise
    except Exception as failed:
        back()
        with suppress(Exception):
            return _in_memory(module, args, kwargs, seen, on_zeros=True)
        failed.add_note(TRIED)
        raise


TRIED = "it was tried on the first samples of the data, with random numbers for tensors from other modules"


def _in_memory(module: nn.Module, args: Any, kwargs: Any, seen: Observers, on_zeros: bool = False) -> Any:
    # a copy in memory, which observers treat as the module
    with torch._C.DisableTorchFunction():  # a copy of a weight does not count as a use
        real = zeros(copied(module))
        if not on_zeros and seen.watch is not None:
            _filled(real, seen.watch.path(module))
    if seen.watch is not None:
        seen.watch.copied(module, real)
    if seen.meter is not None:
        seen.meter.own((*real.parameters(), *real.buffers()))

    # values for its arguments
    arguments = tensors((args, kwargs))
    effects = None if seen.watch is None else seen.watch.effects
    storages = dict(zip(_storages(real), _storages(module), strict=True))
    with torch.device("cpu"):
        made = _stand_ins(arguments, seen.watch, on_zeros)
        storages |= {made[id(t)].untyped_storage()._cdata: t.untyped_storage()._cdata for t in arguments}
        origins = {id(made[id(t)]): t for t in arguments}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        out = _observed(module, InMemory(module, real, args, kwargs, origins), seen)

    # report writes to the copies as writes to the originals
    if seen.meter is not None:
        written = seen.meter.written
        written.update([storages[w] for w in written if w in storages])
    return _returned(out, arguments, made, effects)


OTHER = 1
"""The index of the second batch to try a model with."""


def in_memory(module: nn.Module, path: str = "", parameter_hooks: bool = False) -> nn.Module:
    """Returns a copy with the constructor's values, as far as they are known, else zeros.

    Copies of modules that it refers to in Python attributes, and that are not its own, have zeros.
    """
    real = zeros(copied(module, parameter_hooks))
    originals = {id(m) for m in (*module.modules(), *held_modules(module))}  # a closure may not be copied
    for other in held_modules(real):
        if id(other) not in originals:
            zeros(other)
    _filled(real, path)
    return real


def trial_inputs(inputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
    """Returns inputs for a model: from a batch of the data where known, else random floats and zeros."""
    return sample_inputs(inputs, batch, SampleValues(inputs))


def sample_inputs(inputs: Sequence[torch.Tensor], batch: int, known: SampleValues) -> list[torch.Tensor]:
    """Returns the ``known`` values of a batch, random values for other floats, zeros for the rest."""
    stream = torch.Generator().manual_seed(batch)
    out = []
    for t in inputs:
        value = known.of(t, batch)
        if value is None and t.is_floating_point():
            value = torch.randn(t.shape, generator=stream, device="cpu").to(t.dtype)
        out.append(torch.zeros_like(t, device="cpu") if value is None else value)
    return out


@torch.no_grad()
def _filled(real: nn.Module, path: str) -> None:
    """Copies the constructor's values to ``real``, if they are not too many."""
    named = {**dict(real.named_parameters()), **dict(real.named_buffers())}
    if sum(t.numel() for t in named.values()) > FEW:
        return
    with _disable_current_modes():
        for name, t in named.items():
            value = initial(f"{path}.{name}".strip("."), t)
            if value is not None:
                t.copy_(value)


@dataclass(frozen=True)
class InMemory:
    """A call of ``real``, a copy of ``module`` in memory.

    ``origins`` has the tensors that its arguments stand for.
    """

    module: nn.Module
    real: nn.Module
    args: Any
    kwargs: Any
    origins: Mapping[int, torch.Tensor]

    def run(self) -> Any:
        return self.real(*self.args, **self.kwargs)


def _observed(module: nn.Module, call: InMemory, seen: Observers) -> Any:
    """Runs ``call`` for ``module``; runs it again with other values if they may change what it does."""
    watch, report = seen.watch, seen.report
    if watch is None:
        return call.run()
    since = len(watch.order)
    before = watch.effects.changed
    looked = watch.looked
    with watch.counting(module, call.real), watch.looking():
        out = call.run()
    watch.effects.settle()

    # a second run may read state that the first changed, and then change more; only its effects are kept
    if watch.effects.changed > before:
        back = seen.mark(effects=False)
        call.run()
        watch.effects.settle()
        back()

    # with other values it may run other units, return something else or change other state
    small = sum(t.numel() for t in (*call.real.parameters(), *call.real.buffers())) <= FEW
    if watch.units_below() or (watch.looked > looked and (report is not None or small)):
        was = watch.ran(since)
        for ran, other in _run_on_other_values(call, seen, watch):
            watch.steers |= watch.units_below() and (other is MISSING or ran != was)
            difference = _depends(out, other) if report is not None else ""
            if report is not None and difference:
                report(difference)
    return out


def _storages(module: nn.Module) -> list[int]:
    return [t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())]


SCALES = 1.0, 1e3, 1e-3
"""Scales of random values to try a module with."""


def _run_on_other_values(
    call: InMemory, seen: Observers, watch: ForwardObserver
) -> list[tuple[list[str], Any]]:
    """Returns, for each trial with other values, the units that ran and the result.

    The result is ``MISSING`` if the call failed. The data's other batches are tried first, then drawn values.
    Only the effects of these runs are kept.
    """
    outcomes = []
    back = seen.mark(effects=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for trial in (*range(1, watch.values.batches), *SCALES):
            args, kwargs = _others(call, trial, watch)
            since = len(watch.order)
            out = MISSING
            with suppress(Exception), watch.looking():  # if it fails, the result stays MISSING
                out = call.real(*args, **kwargs)
            watch.effects.settle()
            outcomes.append((watch.ran(since), out))
    back()
    return outcomes


def _others(call: InMemory, trial: int | float, watch: ForwardObserver) -> tuple[Any, Any]:
    """Returns other arguments for ``call``.

    If ``trial`` is an integer, they are those of this batch of the data. If it is a float, they are drawn at
    this scale, and the weights are drawn anew too.
    """
    stream = torch.Generator().manual_seed(round(trial * 1e3))

    def drawn(t: torch.Tensor) -> torch.Tensor:
        scale = trial if isinstance(trial, float) else 1.0
        return (torch.randn(t.shape, generator=stream) * scale).to(t.dtype)

    def other(t: torch.Tensor) -> torch.Tensor:
        at = call.origins.get(id(t))
        out = watch.values.of(at, trial) if at is not None and isinstance(trial, int) else None
        if out is None:
            out = drawn(t) if t.is_floating_point() else t
        watch.effects.follow(out, t)
        return out

    with _unseen():
        if isinstance(trial, float):
            for p in call.real.parameters():
                p.copy_(drawn(p) if p.is_floating_point() else p)
        return mapped(call.args, other), mapped(call.kwargs, other)


@contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


MISSING = object()
NUMBER = "another Python number"
SHAPE = "tensors of another shape"
NUMBERS = (bool, int, float, complex)


def _depends(out: Any, other: Any) -> str:
    """Describes what in ``out`` depends on values, or returns ""; ``other``: the result for other values."""
    one, two = _seen(out), _seen(other)
    numbers = [[v for v in some if isinstance(v, NUMBERS)] for some in (one, two)]
    if other is MISSING:
        return NUMBER if numbers[0] else ""
    if [repr(v) for v in one] == [repr(v) for v in two]:
        return ""
    return NUMBER if numbers[0] != numbers[1] else SHAPE


def _seen(value: Any) -> list[Any]:
    """Returns what Python can see of a value: shapes and dtypes of tensors, and numbers."""
    if isinstance(value, torch.Tensor):
        return [(value.dtype, value.shape)]
    if isinstance(value, NUMBERS):
        return [value]
    if isinstance(value, Mapping):
        return [some for v in value.values() for some in _seen(v)]
    if isinstance(value, list | tuple):
        return [("of", len(value)), *(some for v in value for some in _seen(v))]
    if is_dataclass(value) and not isinstance(value, type):
        return [some for f in fields(value) for some in _seen(getattr(value, f.name, None))]
    return []


META_ERRORS = "meta", "no fake impl", "unsupported scalartype"
"""Parts of the errors of meta tensors; torch.autocast("meta") without a dtype raises the last."""


def needs_values(error: BaseException | None) -> bool:
    """Returns true if Python read values of a meta tensor, or an operator or autocast refuses meta."""
    message = str(error).lower()
    return isinstance(error, RuntimeError | NotImplementedError) and any(m in message for m in META_ERRORS)


def zeros(module: nn.Module) -> nn.Module:
    """Replaces the tensors of ``module`` with zeros in memory, in place; ties and hooks stay.

    Modules may share one dictionary of tensors, which then has the new tensors already.
    """
    made: dict[int, Any] = {}
    replaced: list[torch.Tensor] = []  # keeps the old tensors, whose ids could be reused

    def of(t: Any, make: Callable[[Any], torch.Tensor]) -> Any:
        if id(t) not in made:
            new = make(t)
            replaced.append(t)
            made[id(t)] = made[id(new)] = new
        return made[id(t)]

    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                owner._parameters[name] = of(p, _parameter_of_zeros)
        for name, b in owner._buffers.items():
            if b is not None:
                owner._buffers[name] = of(b, _zeros_in_memory)
    return module


def _parameter_of_zeros(p: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of zeros, or ``p`` itself with zeros if it has hooks."""
    now = nn.Parameter(_zeros_in_memory(p), p.requires_grad)
    if not hooks(p):
        return now
    keep(p, now)
    return p


def _zeros_in_memory(t: torch.Tensor) -> torch.Tensor:
    """Returns zeros like ``t``; large ones, which numpy makes by calloc, take memory only where written."""
    plain = type(t) in (torch.Tensor, nn.Parameter) and t.layout == torch.strided and t.is_contiguous()
    if t.numel() <= FEW or not plain:
        return torch.zeros_like(t, device="cpu")
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        data = torch.from_numpy(np.zeros(t.numel() * t.element_size(), np.uint8))
        return data.view(t.dtype).view(t.shape)
