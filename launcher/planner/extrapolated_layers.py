"""Traces a deep model of equal layers through two shallow ones, and extrapolates what one layer adds.

Numbers in names are extrapolated too: after ``layers.2`` comes ``layers.3``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel
from launcher.job.schema.parallel import Recompute

SHALLOW = 3
"""Layers of the first shallow model: the first and the last layer may differ from those between them."""
DEEP = 8
"""Models with fewer layers are traced directly, which takes no longer."""
LAYER = re.compile(r"layers\.(\d+)(?=\.|$)")
EVERY = re.compile(r"([A-Za-z_.*]|\[[A-Za-z_]+\])*")
"""Globs that match something in every layer or in none."""
DIGITS = re.compile(r"(\d+)")

T = TypeVar("T")


@dataclass(frozen=True)
class Fewer:
    """The request for the model with fewer layers, and its modules that are not cut."""

    job: Job
    uncut: tuple[str, ...] | None


@dataclass(frozen=True)
class Shallow:
    """Two shallow models: the second has one layer more than the first, the deep model has ``steps`` more."""

    first: Fewer
    second: Fewer
    steps: int

    def deeper(self, one: T, two: T) -> T:
        """Extrapolates a value of the two shallow models to the deep model. Raises ``Unlike``."""
        out: T = _along(one, two, self.steps)
        return out


class Unlike(Exception):
    """Two models differ in more than one additional layer."""


def shallow(job: Job, uncut: tuple[str, ...] | None) -> Shallow | None:
    """Returns the two models; ``None`` if there are few layers or the request treats layers differently."""
    model, par = job.model, job.parallel
    if not isinstance(model, LanguageModel) or model.layers < DEEP:
        return None
    if job.train.compile is not None or par.param_strategy.load is not None:
        return None
    named = (dict(par.operators), _recomputed(par.recompute), dict.fromkeys(uncut or ()))
    if not all(_alike(settings, model.layers) for settings in named):
        return None
    if par.recompute is not None and par.recompute.every != 1:
        return None
    if par.pipeline.seq_chunks > 1:  # where sequences are cut depends on the work of the full model
        return None
    first, second = (_with(job, model, uncut, depth) for depth in (SHALLOW, SHALLOW + 1))
    return Shallow(first, second, model.layers - SHALLOW)


def _recomputed(recompute: Recompute | None) -> dict[str, Any]:
    """Returns the recompute policy by module name."""
    modules = () if recompute is None else recompute.modules
    if isinstance(modules, dict):
        return dict(modules)
    return dict.fromkeys((modules,) if isinstance(modules, str) else modules)


def _alike(settings: dict[str, Any], layers: int) -> bool:
    """Returns true if the settings of every layer have the same values."""
    each: list[list[tuple[str, Any]]] = [[] for _ in range(layers)]
    for name, value in settings.items():
        match = LAYER.search(name)
        if match and int(match[1]) < layers:
            each[int(match[1])].append((LAYER.sub("layers", name), value))
        elif EVERY.fullmatch(name) is None:
            return False
    return all(one == each[0] for one in each)


def _with(job: Job, model: LanguageModel, uncut: tuple[str, ...] | None, depth: int) -> Fewer:
    def exists(name: str) -> bool:
        match = LAYER.search(name)
        return match is None or int(match[1]) < depth

    # the settings of layers that do not exist would be refused
    recompute = job.parallel.recompute
    if recompute is not None:
        modules = recompute.modules
        if isinstance(modules, dict):
            modules = {name: policy for name, policy in modules.items() if exists(name)}
        elif not isinstance(modules, str):
            modules = tuple(filter(exists, modules))
        recompute = recompute.model_copy(update={"modules": modules})
    operators = {name: cut for name, cut in job.parallel.operators.items() if exists(name)}
    parallel = job.parallel.model_copy(update={"recompute": recompute, "operators": operators})
    update = {"model": model.model_copy(update={"layers": depth}), "parallel": parallel}
    return Fewer(job.model_copy(update=update), uncut and tuple(filter(exists, uncut)))


def _along(one: Any, two: Any, steps: int) -> Any:
    """Extrapolates ``steps`` steps from ``one``, where ``two`` is one step after it.

    >>> _along(("layers.1", 5), ("layers.2", 7), 3)
    ('layers.4', 11)
    >>> _along(("embed", "layers.1", "norm_2"), ("embed", "layers.1", "layers.2", "norm_3"), 3)
    ('embed', 'layers.1', 'layers.2', 'layers.3', 'layers.4', 'norm_5')
    """
    if type(one) is not type(two):
        raise Unlike
    if one == two:
        return one
    if isinstance(one, str):
        return _name(one, two, steps)
    if isinstance(one, int) and not isinstance(one, bool):
        return one + steps * (two - one)
    if isinstance(one, tuple):
        return _row(one, two, steps)
    if isinstance(one, frozenset) and len(one) == len(two):
        return frozenset(_along(a, b, steps) for a, b in zip(sorted(one), sorted(two), strict=True))
    if is_dataclass(one):
        changes = {f.name: _along(getattr(one, f.name), getattr(two, f.name), steps) for f in fields(one)}
        return replace(one, **changes)  # type: ignore[type-var]
    raise Unlike


def _name(one: str, two: str, steps: int) -> str:
    """Returns ``one`` with each number in it extrapolated."""
    first, second = DIGITS.split(one), DIGITS.split(two)
    if len(first) != len(second) or first[::2] != second[::2]:
        raise Unlike
    numbers = (str(_along(int(a), int(b), steps)) for a, b in zip(first[1::2], second[1::2], strict=True))
    return "".join(chain.from_iterable(zip(first[::2], (*numbers, ""), strict=True)))


def _row(one: Sequence[Any], two: Sequence[Any], steps: int) -> tuple[Any, ...]:
    """Repeats the added items once for each step, each time extrapolated further."""
    more = len(two) - len(one)
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
    if more < 0 or more > same:
        raise Unlike
    before, added = two[same - more : same], two[same : same + more]
    new = (_along(a, b, n) for n in range(1, steps + 1) for a, b in zip(before, added, strict=True))
    rest = zip(one[same:], two[same + more :], strict=True)
    return (*one[:same], *new, *(_along(a, b, steps) for a, b in rest))
