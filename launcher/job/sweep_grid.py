"""Axes of a sweep, and candidates of a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.core.override_parser.types import Override as Parsed
from hydra.errors import HydraException
from omegaconf import OmegaConf

from launcher.errors import Problem, collecting_problems
from launcher.job.config_folders import ConfigFiles
from launcher.job.hydra_compose import hydrate
from launcher.job.overrides import OPERATORS, paste, read, written
from launcher.job.schema import keys, redact
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.job.schema.search import AUTO, AXES, RECOMPUTE
from launcher.job.stray_arguments import KnownNames, sift
from launcher.job.sweep_cell_names import cell_name

OWN = "sweep."
"""The prefix of the sweep's own keys."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. ``varied``: those of its overrides that differ between cells.

    ``repeat``: its index among runs that differ only in the seed.
    """

    name: str
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    repeat: int = 0


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``; ``log``: on a logarithmic scale; ``integers``: integers only."""

    low: float
    high: float
    log: bool
    integers: bool


@dataclass(frozen=True)
class SweepAxis:
    """The values of one override: ``words``, or ``key`` with a number from ``interval``."""

    key: str
    words: tuple[str, ...]
    interval: Interval | None = None

    @property
    def varies(self) -> bool:
        return self.interval is not None or len(self.words) > 1

    @property
    def ends(self) -> tuple[str, ...]:
        """All words; for an interval, the words of its two ends."""
        it = self.interval
        return self.words if it is None else (self.word(it.low), self.word(it.high))

    def word(self, value: float) -> str:
        """
        >>> SweepAxis("train.steps", (), Interval(1, 9, False, True)).word(4.0)
        'train.steps=4'
        """
        assert self.interval is not None
        return f"{self.key}={int(value) if self.interval.integers else float(value)!r}"


def axes(overrides: Sequence[str], configs: ConfigFiles) -> tuple[SweepAxis, ...]:
    """Returns one axis per override. Raises ``RequestError``."""
    with collecting_problems() as wrong:
        single = sift(overrides, KnownNames(configs.groups(), configs.options("recipe")), wrong)
        return tuple(_axis(o, configs, wrong) for o in single)


def written_axes(
    over: Mapping[str, str | Sequence[Any]], typed: Sequence[SweepAxis], configs: ConfigFiles
) -> tuple[SweepAxis, ...]:
    """Returns the axes of ``sweep.over`` whose keys are not ``typed``. Raises ``RequestError``."""
    there = {axis.key.lstrip("+~") for axis in typed}
    known = (*dict.fromkeys(keys.everywhere()), *configs.groups())
    out: list[SweepAxis] = []
    with collecting_problems() as wrong:
        for key, values in over.items():
            if key in there:
                continue
            if key not in known:
                hint = did_you_mean(nearest(key, known, 0.75))
                wrong.append(Problem(f"sweep.over.{key}", f"there is no such setting{hint}"))
            elif isinstance(values, str):
                out.append(_axis(f"{key}={values}", configs, wrong))
            else:
                out.append(SweepAxis(key, tuple(f"{key}={written(value)}" for value in values)))
    return tuple(out)


def grid(overrides: Sequence[SweepAxis]) -> tuple[Cell, ...]:
    """Returns every combination, the last override varying fastest.

    Cells are named by the values that vary.
    """
    varying = [i for i, axis in enumerate(overrides) if axis.varies]
    out = []
    for k, combination in enumerate(itertools.product(*(axis.words for axis in overrides))):
        out.append(cell(k, combination, tuple(combination[i] for i in varying)))
    return tuple(out)


def cell(number: int, overrides: tuple[str, ...], varied: tuple[str, ...]) -> Cell:
    return Cell(cell_name(number, varied), overrides, varied)


def repeated(one: Cell, seeds: Sequence[int]) -> tuple[Cell, ...]:
    """Returns one cell per seed; only ``one`` itself if there is a single seed."""
    if len(seeds) == 1:
        return (one,)
    return tuple(
        Cell(f"{one.name}-seed{seed}", (*one.overrides, f"seed={seed}"), one.varied, repeat)
        for repeat, seed in enumerate(seeds)
    )


def values(one: Cell) -> Mapping[str, str]:
    """Returns the varied values of a cell by key, with secrets hidden."""
    pairs = (redact.text(word).partition("=") for word in one.varied)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def _axis(text: str, configs: ConfigFiles, problems: list[Problem]) -> SweepAxis:
    """Returns the axis of an override: the values that it lists, or its interval."""

    class Options:
        """The part of Hydra's loader that its grammar needs for ``glob(...)``."""

        def get_group_options(self, group_name: str, results_filter: object = None) -> list[str]:
            return list(configs.options(group_name))

    try:
        parsed: Parsed = OverridesParser.create(config_loader=cast(Any, Options())).parse_overrides([text])[0]
    except HydraException:
        read([text], problems)
        return SweepAxis(text.partition("=")[0], (text,))
    key = parsed.get_key_element()
    if not parsed.is_sweep_override():
        return SweepAxis(key, (text,))
    if not parsed.is_discrete_sweep():
        return _interval(key, parsed, text, problems)
    words = tuple(f"{key}={v}" for v in parsed.sweep_string_iterator())
    if not words:
        problems.append(Problem(parsed.key_or_group, f"{parsed.get_value_string()}: matches nothing"))
    return SweepAxis(key, words)


def _interval(key: str, parsed: Parsed, text: str, problems: list[Problem]) -> SweepAxis:
    span = parsed.value()
    assert isinstance(span, IntervalSweep)
    low, high = span.start, span.end
    integral = isinstance(low, int) and isinstance(high, int)
    log = "log" in span.tags
    name, shown = parsed.key_or_group, parsed.get_value_string()
    assert low is not None
    assert high is not None
    if not low < high:
        problems.append(Problem(name, f"{shown}: the lower end comes first"))
    elif log and low <= 0:
        problems.append(Problem(name, f"{shown}: a logarithmic scale needs a lower end above 0"))
    return SweepAxis(key, (text,), Interval(low, high, log, integral))


def wrong(job: Job, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields candidates that their key does not accept, and keys that cannot be searched over.

    ``data``: the composed configuration.
    """
    for key, candidates in job.search.over.items():
        if key not in AXES:
            yield Problem(f"search.over.{key}", f"this key cannot be searched; these can: {', '.join(AXES)}")
        elif isinstance(candidates, tuple) and not candidates:
            yield Problem(key, "[]: the list of candidates is empty", paste(key, AUTO))
        elif isinstance(candidates, tuple) and key != OPERATORS:
            note = keys.at(key.split("."), data)
            own = AUTO if key == RECOMPUTE else None  # at all other keys, auto leaves the value to the search
            bad = [c for c in candidates if c != own and (c == AUTO or not keys.accepts(note, c))]
            if bad:
                listed = written(list(candidates))
                good = [c for c in candidates if c not in bad]
                text = f"{listed}: {written(bad[0])} is not a valid value of this key"
                yield Problem(key, text, paste(key, good) if good else "")


def named_operators(job: Job, configs: ConfigFiles) -> tuple[Job, list[Problem]]:
    """Replaces names of options for ``parallel.operators`` by their content, under that name.

    Items of a list that are no names get their number as the name. Returns the problems, too.
    """
    requested = job.search.over.get(OPERATORS)
    if requested is None or isinstance(requested, Mapping):
        return job, []
    says = isinstance(job.model, HuggingFace)  # such a model defines how tp cuts it
    options = [o for o in configs.options("operators") if says or o != AUTO]
    named: dict[str, Any] = {}
    problems = []
    for n, one in enumerate(options if requested == AUTO else requested, 1):
        if isinstance(one, Mapping):
            named[str(n)] = dict(one)
        elif one in options:
            named[str(one)] = _option(str(one), configs)
        else:
            text = f"{one}: neither an option of operators ({', '.join(options)}) nor strategies by module"
            problems.append(Problem(OPERATORS, text))
    search = job.search.model_copy(update={"over": {**job.search.over, OPERATORS: named}})
    return job.model_copy(update={"search": search}), problems


def _option(name: str, configs: ConfigFiles) -> Any:
    """Returns the value that ``operators=NAME`` sets."""
    composed = hydrate([f"operators={name}"], configs)
    assert not isinstance(composed, Problem)
    return OmegaConf.to_container(OmegaConf.select(composed.cfg, OPERATORS), resolve=True)
