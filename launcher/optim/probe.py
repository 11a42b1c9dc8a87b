"""Tries a user-defined optimizer on small tensors, to learn what its updates depend on."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal
from unittest import mock

import torch
from torch import Tensor

from launcher.optim.state_packing import pack, unpackable
from launcher.optim.trial import Broken, Build, Observation, Shape, Trial, TrialCut, keys, small
from launcher.plan.values.optimizer_traits import OptimizerTraits

CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Tolerance as a share of the way that a value has moved.

The same sums in another order differ by less, other sums by more.
"""
DTYPES = {"float64": (torch.float64,), "float32": (torch.float64, torch.float32)}
"""The dtypes to try for weights of a dtype: fp64 first, which tells more if the class supports it."""


def probe(
    build: Build, name: str, shapes: Sequence[Shape], device: str = "cpu", dtype: str = "float64"
) -> OptimizerTraits:
    """Return what the class at ``name`` does to tensors of ``shapes``.

    ``build`` makes the optimizer of a list of tensors; ``device`` and ``dtype`` are those of the weights.
    Raises ``RequestError`` if no such class exists, or its arguments do not fit.
    """
    why = ""
    with _apart():
        for kind in DTYPES[dtype]:
            try:
                return _traits(Trial(build, small(shapes), device, kind), name)
            except Broken as broken:
                why = str(broken)
    return OptimizerTraits(name, broken=why)


@contextmanager
def _apart() -> Iterator[None]:
    """Isolate the trial: threads, random streams and devices are as before afterwards.

    Ranks are forked later, when no thread may run and no device may be in use.
    """
    threads, stream = torch.get_num_threads(), random.getstate()
    torch.set_num_threads(1)

    try:
        with torch.random.fork_rng(devices=[]), _no_accelerator(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(stream)


def _no_accelerator() -> AbstractContextManager[object]:
    """Hide the accelerator: torch's optimizers query and start it before they take a step on the CPU."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return nullcontext()
    return mock.patch.object(torch.get_device_module(found), "is_available", return_value=False)


def _traits(trial: Trial, name: str) -> OptimizerTraits:
    seen = trial.observed()
    want = [p.detach() for p in seen.params]
    if _alike(want, trial.starts) and any(g["initial_lr"] for g in seen.optimizer.param_groups):
        raise Broken("its step() changes no parameter")

    # split along the first dim, then along each other dim
    rows = _near(trial, seen, TrialCut(0))
    others = range(1, max(map(len, trial.shapes)))

    return OptimizerTraits(
        name,
        rows=rows,
        elements=rows and all(_near(trial, seen, TrialCut(dim)) for dim in others),
        alone=_close(trial.alone(), seen),
        empty=_near(trial, seen, TrialCut(0, empty=True)),
        unused=_works(trial),
        draws=_draws(trial, want),
        first=seen.first,
        keys=keys(seen.params, seen.optimizer),
        odd=_odd(seen),
        counters=seen.counters,
        lost=_lost(trial, seen, want),
        copies=_copies(seen),
    )


def _near(trial: Trial, seen: Observation, cut: TrialCut) -> bool:
    """Whether the tensors of a split run end where those of the unsplit run do."""
    try:
        return _close(trial.run(cut), seen)
    except Broken:
        return False


def _close(got: Sequence[Tensor], seen: Observation) -> bool:
    """Compare value by value: a large value must not hide a wrong one beside it."""
    for a, p, path in zip(got, seen.params, seen.paths, strict=True):
        want = p.detach()
        rounding = 500 * torch.finfo(want.dtype).eps * (want.abs() + path)
        near = (a - want).abs() <= CLOSE[want.dtype] * path + rounding
        if not (near | (a == want) | (a.isnan() & want.isnan())).all():
            return False
    return True


def _alike(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether the tensors are bit-equal, except for NaN."""
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def _works(trial: Trial) -> bool:
    try:
        trial.unused()
    except Broken:
        return False
    return True


def _draws(trial: Trial, want: Sequence[Tensor]) -> Literal["", "torch", "elsewhere"]:
    """Whether the values change with the seed; if they do, whether torch's generator alone decides."""
    if _alike(trial.run(seed=1), want):
        return ""
    return "torch" if _alike(trial.run(seed=0), want) else "elsewhere"


def _odd(seen: Observation) -> str:
    """Describe the first state that has neither its parameter's shape nor zero dims."""
    for p in seen.params:
        for key, t in pack(seen.optimizer, p).items():
            if t.ndim and t.shape != p.shape:
                return f"{key} of shape {list(t.shape)} for a parameter of shape {list(p.shape)}"
    return ""


def _lost(trial: Trial, seen: Observation, want: Sequence[Tensor]) -> str:
    known = {id(p) for p in seen.params}
    if any(id(key) not in known for key in seen.optimizer.state):
        return "it keeps state under keys that are no parameters"
    if found := [text for p in seen.params for text in unpackable(seen.optimizer, p, seen.counters)]:
        return f"it keeps {found[0]}, which checkpoints cannot store"
    if _alike(trial.resumed(seen.counters), want):
        return ""
    return "restored from its state and groups, it computes other numbers: it keeps state elsewhere"


def _copies(seen: Observation) -> int:
    """Return the number of state tensors of a parameter's size per parameter, on average, rounded."""
    held = sum(t.numel() for p in seen.params for t in pack(seen.optimizer, p).values() if t.ndim)
    return round(held / max(sum(p.numel() for p in seen.params), 1))
