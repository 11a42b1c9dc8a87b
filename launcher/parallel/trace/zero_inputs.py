"""Runs a module that looks at data, or autocast, on zeros in memory while the rest of a forward is on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
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
    """``out`` of stand-ins, on meta again; what is one of the ``given`` is that, and gradients reach all of them."""
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


def call(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    meter: Meter | None = None,
    watch: Watch | None = None,
    on_zeros: bool = False,
    told: Callable[[str], None] | None = None,
) -> Any:
    """Run a module on meta tensors; one whose Python looks at the data runs on zeros in memory, alone,
    instead.

    Then ``meter`` and ``watch`` forget what they saw of the first try. ``on_zeros``: without trying.
    ``told``: of what it returns, where that depends on the numbers and Python can see it.
    """
    if not on_zeros:
        undo = [seen.mark() for seen in (meter, watch) if seen is not None]
        try:
            return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as refused:
            if not looks(refused):
                raise
        for back in undo:
            back()

    # a copy in memory, which whoever watches takes for the module
    with torch._C.DisableTorchFunction():  # to copy a weight is not to use it
        real = zeros(copied(module))
    if watch is not None:
        watch.copied(module, real)
    if meter is not None:
        meter.own((*real.parameters(), *real.buffers()))

    # zeros for what it is given
    given = tensors((args, kwargs))
    storages = dict(zip(_storages(real), _storages(module), strict=True))
    with torch.device("cpu"):
        made = {id(t): _zeros(t) for t in given}
        storages |= {made[id(t)].untyped_storage()._cdata: t.untyped_storage()._cdata for t in given}
        args, kwargs = mapped((args, kwargs), lambda t: made[id(t)])
        out = _observed(module, real, args, kwargs, meter=meter, watch=watch, told=told)

    # as if it had run on meta
    if meter is not None:
        meter.written.update([storages[w] for w in meter.written if w in storages])
    return _returned(out, given, made)


def _observed(
    module: nn.Module,
    real: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    meter: Meter | None,
    watch: Watch | None,
    told: Callable[[str], None] | None,
) -> Any:
    """Run ``real`` in the place of ``module``; again, and with other numbers, where that may do something else."""
    if watch is None:
        return real(*args, **kwargs)
    since = len(watch.order)
    before = watch.effects.changed
    looked = watch.looked
    with watch.counting(module, real), watch.looking():
        out = real(*args, **kwargs)
    if watch.effects.changed > before:
        _again(real, args, kwargs, meter, watch)

    if watch.units_below() or (told is not None and watch.looked > looked):
        was = watch.ran(since)
        for ran, other in _tried(real, args, kwargs, meter, watch):
            watch.steers |= watch.units_below() and (other is MISSING or ran != was)
            what = _depends(out, other) if told is not None else ""
            if told is not None and what:
                told(what)
    return out


def _storages(module: nn.Module) -> list[int]:
    return [t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())]


def _again(real: nn.Module, args: Any, kwargs: Any, meter: Meter | None, watch: Watch) -> None:
    """It may look at what it has changed, and change other things then: of this run those alone are kept."""
    undo = [watch.mark(effects=False), *([meter.mark()] if meter is not None else [])]
    real(*args, **kwargs)
    for back in undo:
        back()


SCALES = 1.0, 1e3, 1e-3
"""Of the numbers that a module is tried with."""


def _tried(
    real: nn.Module, args: Any, kwargs: Any, meter: Meter | None, watch: Watch
) -> list[tuple[list[str], Any]]:
    """Which units ran with a few other numbers, and what came of it: ``MISSING`` where it does not take them.

    Nothing of it is kept. Where no units are inside, nobody has to see what it does.
    """
    g = torch.Generator().manual_seed(0)
    found = []
    undo = [seen.mark() for seen in (meter, watch) if seen is not None]
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        nullcontext() if watch.units_below() else _unseen(),
    ):
        for scale in SCALES:

            def noise(t: torch.Tensor, scale: float = scale) -> torch.Tensor:
                return (torch.randn(t.shape, generator=g) * scale).to(t.dtype) if t.is_floating_point() else t

            for p in real.parameters():
                p.copy_(noise(p))
            since = len(watch.order)
            out = MISSING
            with suppress(Exception):  # then who knows
                out = real(*mapped(args, noise), **mapped(kwargs, noise))
            found.append((watch.ran(since), out))
    for back in undo:
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
    """``module`` itself, its tensors now zeros in memory; what was one tensor under several names still is."""
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
