"""Probes one of the user's own optimizers on small tensors: what does an update depend on?"""

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
"""Of the way that a number went: the same sums in another order end nearer together, other sums do not."""
DTYPES = {"float64": (torch.float64,), "float32": (torch.float64, torch.float32)}
"""What is tried for weights of a dtype: where a class can, fp64 tells more."""


def probe(
    build: Build, name: str, shapes: Sequence[Shape], device: str = "cpu", dtype: str = "float64"
) -> OptimizerTraits:
    """What the class at ``name`` does to tensors of such ``shapes``.

    ``build`` makes it for a list of tensors; ``device`` and ``dtype`` are those of the weights. Raises
    ``RequestError`` when there is no such class, or its arguments do not fit.
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
    """Nothing of it is seen outside: ranks are forked later, when no thread may run and no device be used."""
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
    """Torch's optimizers ask for one, and start it, before they take a step on the CPU."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return nullcontext()
    return mock.patch.object(torch.get_device_module(found), "is_available", return_value=False)


def _traits(trial: Trial, name: str) -> OptimizerTraits:
    seen = trial.observed()
    want = [p.detach() for p in seen.params]
    if _alike(want, trial.starts) and any(g["initial_lr"] for g in seen.optimizer.param_groups):
        raise Broken("its step() changes no parameter")

    # cut along the first dim, then along any
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
    """Whether the tensors end where they do when they are not cut."""
    try:
        return _close(trial.run(cut), seen)
    except Broken:
        return False


def _close(got: Sequence[Tensor], seen: Observation) -> bool:
    """Number by number: beside one that went far, others may be wrong unseen."""
    for a, p, path in zip(got, seen.params, seen.paths, strict=True):
        want = p.detach()
        rounding = 500 * torch.finfo(want.dtype).eps * (want.abs() + path)
        near = (a - want).abs() <= CLOSE[want.dtype] * path + rounding
        if not (near | (a == want) | (a.isnan() & want.isnan())).all():
            return False
    return True


def _alike(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """To the last bit."""
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def _works(trial: Trial) -> bool:
    try:
        trial.unused()
    except Broken:
        return False
    return True


def _draws(trial: Trial, want: Sequence[Tensor]) -> Literal["", "torch", "elsewhere"]:
    """Whether the numbers change with the seed; if they do, whether torch's alone decides."""
    if _alike(trial.run(seed=1), want):
        return ""
    return "torch" if _alike(trial.run(seed=0), want) else "elsewhere"


def _odd(seen: Observation) -> str:
    """The first state of another shape than its parameter's that is no single number without dims."""
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
    """Tensors of a parameter's size for each parameter, on average."""
    held = sum(t.numel() for p in seen.params for t in pack(seen.optimizer, p).values() if t.ndim)
    return round(held / max(sum(p.numel() for p in seen.params), 1))
