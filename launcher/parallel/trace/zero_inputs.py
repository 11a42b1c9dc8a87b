"""Runs a module that looks at data, or autocast, on zeros in memory, while the rest is on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from launcher.parallel.cost.forward_cost import Meter
from launcher.parallel.dispatch.containers import mapped, tensors
from launcher.parallel.dispatch.pytree import tree_map_only
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.trace.usage import Watch


def cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Autocast does nothing on meta tensors, so this one call runs on zeros in memory."""
    given = tensors((args, kwargs))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        args, kwargs = tree_map_only(torch.device, lambda d: torch.device("cpu"), (args, kwargs))
        out = func(*args, **kwargs)
    return _returned(out, given, made)


def _returned(out: Any, given: list[torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    """``out`` of stand-ins, on meta again; one of the ``given`` is that itself, and gradients reach them."""
    back = {id(made[id(t)]): t for t in given}
    fresh = {id(t): t for t in tensors(out) if id(t) not in back}
    specs = [(t.shape, t.dtype, t.requires_grad) for t in fresh.values()]
    with torch.device("meta"):
        metas = _Opaque.apply(specs, torch.empty((), requires_grad=True), *given)  # type: ignore[no-untyped-call]
    back |= dict(zip(fresh, metas, strict=True))
    return mapped(out, lambda t: back[id(t)])


class _Opaque(torch.autograd.Function):
    """Meta tensors for what something has returned that ran elsewhere."""

    @staticmethod
    def forward(ctx: Any, specs: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in specs)
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(out, specs, strict=True) if not grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("a plan has no backward")


def _zeros(t: torch.Tensor) -> torch.Tensor:
    """In memory, and no leaf of autograd where ``t`` has a gradient: it may be changed in place."""
    out = torch.zeros_like(t, device="cpu")
    return out.requires_grad_().clone() if t.requires_grad else out


@dataclass(frozen=True)
class Observers:
    """Who counts and watches what a module does, and who is ``told`` of what it returns.

    ``told`` is called with what depends on the numbers where Python can see it.
    """

    meter: Meter | None = None
    watch: Watch | None = None
    told: Callable[[str], None] | None = None

    def mark(self, effects: bool = True) -> Callable[[], None]:
        """What makes both forget all that they see from now on, or all but ``effects``."""
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
    """Run a module on meta tensors; one whose Python looks at the data instead alone on zeros in memory.

    Then the observers forget what they saw of the first try. ``on_zeros``: without trying.
    """
    if not on_zeros:
        back = seen.mark()
        try:
            return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as refused:
            if not looks(refused):
                raise
        back()

    # a copy in memory, which whoever watches takes for the module
    with torch._C.DisableTorchFunction():  # to copy a weight is not to use it
        real = zeros(copied(module))
    if seen.watch is not None:
        seen.watch.copied(module, real)
    if seen.meter is not None:
        seen.meter.own((*real.parameters(), *real.buffers()))

    # zeros for what it is given
    given = tensors((args, kwargs))
    storages = dict(zip(_storages(real), _storages(module), strict=True))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        storages |= {made[id(t)].untyped_storage()._cdata: t.untyped_storage()._cdata for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        out = _observed(module, _OnZeros(real, args, kwargs), seen)

    # as if it had run on meta
    if seen.meter is not None:
        written = seen.meter.written
        written.update([storages[w] for w in written if w in storages])
    return _returned(out, given, made)


@dataclass(frozen=True)
class _OnZeros:
    """A call of ``real``, a module in memory, with arguments in memory."""

    real: nn.Module
    args: Any
    kwargs: Any

    def run(self) -> Any:
        return self.real(*self.args, **self.kwargs)


def _observed(module: nn.Module, call: _OnZeros, seen: Observers) -> Any:
    """Run ``call`` in the place of ``module``; also with other numbers, where that may do something else."""
    watch, told = seen.watch, seen.told
    if watch is None:
        return call.run()
    since = len(watch.order)
    before = watch.effects.changed
    looked = watch.looked
    with watch.counting(module, call.real), watch.looking():
        out = call.run()

    # it may look at what it has changed, and change other things then: of this run those alone are kept
    if watch.effects.changed > before:
        back = seen.mark(effects=False)
        call.run()
        back()

    if watch.units_below() or (told is not None and watch.looked > looked):
        was = watch.ran(since)
        for ran, other in _tried(call, seen, watch):
            watch.steers |= watch.units_below() and (other is MISSING or ran != was)
            what = _depends(out, other) if told is not None else ""
            if told is not None and what:
                told(what)
    return out


def _storages(module: nn.Module) -> list[int]:
    return [t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())]


SCALES = 1.0, 1e3, 1e-3
"""Of the numbers that a module is tried with."""


def _tried(call: _OnZeros, seen: Observers, watch: Watch) -> list[tuple[list[str], Any]]:
    """Which units ran with a few other numbers, and what came of it: ``MISSING`` where it takes none.

    Nothing of it is kept. Where no units are inside, nobody has to see what it does.
    """
    g = torch.Generator().manual_seed(0)
    found = []
    back = seen.mark()
    observed = nullcontext() if watch.units_below() else _unseen()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), observed:
        for scale in SCALES:

            def noise(t: torch.Tensor, scale: float = scale) -> torch.Tensor:
                if not t.is_floating_point():
                    return t
                return (torch.randn(t.shape, generator=g) * scale).to(t.dtype)

            for p in call.real.parameters():
                p.copy_(noise(p))
            since = len(watch.order)
            out = MISSING
            with suppress(Exception):  # then who knows
                out = call.real(*mapped(call.args, noise), **mapped(call.kwargs, noise))
            found.append((watch.ran(since), out))
    back()
    return found


@contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


MISSING = object()
NUMBER = "another Python number"
SHAPE = "tensors of another shape"
NUMBERS = (bool, int, float, complex)


def _depends(out: Any, other: Any) -> str:
    """What of ``out`` depends on numbers, if ``other`` is what came of other ones."""
    one, two = _seen(out), _seen(other)
    numbers = [[v for v in some if isinstance(v, NUMBERS)] for some in (one, two)]
    if other is MISSING:
        return NUMBER if numbers[0] else ""
    if [repr(v) for v in one] == [repr(v) for v in two]:
        return ""
    return NUMBER if numbers[0] != numbers[1] else SHAPE


def _seen(value: Any) -> list[Any]:
    """What Python can see of it: shapes and dtypes of tensors, and numbers."""
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


def looks(error: BaseException | None) -> bool:
    """Whether it says that Python looked at the data of a tensor that has none."""
    return isinstance(error, RuntimeError | NotImplementedError) and "meta" in str(error).lower()


def zeros(module: nn.Module) -> nn.Module:
    """``module`` itself, its tensors now zeros in memory; one tensor under several names is still one."""
    made: dict[int, Any] = {}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.zeros_like(p, device="cpu"), p.requires_grad)
                owner._parameters[name] = made[id(p)]
        for name, b in owner._buffers.items():
            if b is not None:
                owner._buffers[name] = made.setdefault(id(b), torch.zeros_like(b, device="cpu"))
    return module
