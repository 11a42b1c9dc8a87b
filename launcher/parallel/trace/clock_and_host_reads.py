"""Tests whether a forward computes with values from outside of the model: a clock, a process, a host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.model_state.module_globals import contents_put_back, files_of, globals_of, put_back
from launcher.parallel.model_state.process_state import CLOCKS, PLACES
from launcher.parallel.model_state.python_state import library
from launcher.parallel.trace.mixing_samples import (
    REPEATS,
    SAMPLES,
    FixedDraws,
    alike,
    numbers_if_too_large,
    run,
)
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.run_module import in_memory, trial_inputs
from launcher.parallel.trace.sample_values import trying


@dataclass(frozen=True)
class OutsideReads:
    """The functions of ``CLOCKS`` and ``PLACES`` whose results an output depends on."""

    clocks: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def outside_reads(model: nn.Module, inputs: Sequence[Tensor]) -> OutsideReads:
    """Returns the functions outside of the model whose results its output depends on.

    Nothing is found for a model that is too large to try, or that fails. ``inputs`` are on meta; their number
    of samples does not matter.
    """
    if not trying() or numbers_if_too_large(model) or any(not x.dim() for x in inputs):
        return OutsideReads()
    some = [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]
    names = files_of(model)

    # the user's code may raise anything for drawn values; other checks judge the forward
    with suppress(Exception, SystemExit), default_dtype(torch.float64), torch.device("cpu"):
        xs = [x.double() if x.is_floating_point() else x for x in trial_inputs(some, 0)]
        real = in_memory(model).double()
        together, called = _answered(real, xs, names)

        def depends(other: str = "") -> bool:
            # several times: a random result may equal the first one by chance
            again = (_answered(real, xs, names, other)[0] for _ in range(REPEATS))
            return any(not alike(together, outputs, 1e-12) for outputs in again)

        clocks = {_name(*known) for known in CLOCKS}
        used = [name for name in called if depends(name)]
        again = () if clocks.intersection(used) or not depends() else (UNKNOWN,)
        return OutsideReads(
            clocks=(*(name for name in used if name in clocks), *again),
            places=tuple(name for name in used if name not in clocks),
        )
    return OutsideReads()


UNKNOWN = "something outside of it, such as a clock or an address"
"""Names the cause if the same samples give another output in each call."""


def _name(owner: Any, function: str, change: object = None) -> str:
    return f"{owner.__name__}.{function}()"


def _answered(
    model: nn.Module, xs: list[Tensor], names: list[str], other: str = ""
) -> tuple[list[Tensor], dict[str, None]]:
    """Returns the outputs, and the functions that were called; the result of ``other`` is changed."""
    seen: dict[str, None] = {}
    kept = torch.random.fork_rng(devices=[]), streams_kept(), put_back(names), contents_put_back(model)
    with ExitStack() as around:
        for each in (*kept, _patched(names, seen, other), torch.no_grad()):
            around.enter_context(each)
        drawn = around.enter_context(FixedDraws(wide=True))
        out = run(model, xs)
        return ([] if drawn.drew else out), seen


@contextmanager
def _patched(names: Sequence[str], seen: dict[str, None], other: str) -> Iterator[None]:
    """Notes in ``seen`` which functions the model's code calls, also those that its files import by name."""
    placed: list[tuple[Any, str, Any]] = []
    known = {id(getattr(owner, name)): (owner, name, change) for owner, name, change in (*CLOCKS, *PLACES)}
    places = [(owner, name, getattr(owner, name)) for owner, name, _ in known.values()]
    places += [(owner, key, value) for owner, key, value in globals_of(names) if id(value) in known]
    for owner, key, function in places:
        home, name, change = known[id(function)]
        placed.append((owner, key, function))
        setattr(
            owner,
            key,
            _noting(function, _name(home, name), change if _name(home, name) == other else None, seen),
        )
    try:
        yield
    finally:
        for owner, key, function in placed:
            setattr(owner, key, function)


def _noting(
    function: Callable[..., Any], name: str, change: Callable[[Any], Any] | None, seen: dict[str, None]
) -> Callable[..., Any]:
    def answered(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        if not _called_by_user_code():
            return answer
        seen[name] = None
        return answer if change is None else change(answer)

    return answered


def _called_by_user_code() -> bool:
    """Returns true if the user's code makes this call, directly or through Python's own modules."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in sys.stdlib_module_names:
            return not library(module)
        frame = frame.f_back
    return False
