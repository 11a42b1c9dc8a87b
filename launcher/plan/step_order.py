"""The order of steps: which run together, and what each needs from earlier ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import cast

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Step
from launcher.plan.verbs import (
    CHECKPOINT,
    EXPORTED,
    TRANSFORMED,
    VERBS,
    Where,
    loads,
    needs,
    starts,
    verb,
    where,
)


@dataclass(frozen=True)
class Phase:
    """Consecutive steps in one place: all ``ranks``, one process ``alone``, or ``files`` without torch."""

    where: Where
    steps: tuple[str, ...]


def phases(steps: Mapping[str, Step]) -> tuple[Phase, ...]:
    """Groups ``steps``, in order, by where they run."""
    out: list[Phase] = []
    for name, step in steps.items():
        if out and out[-1].where == where(step):
            out[-1] = Phase(out[-1].where, (*out[-1].steps, name))
        else:
            out.append(Phase(where(step), (name,)))
    return tuple(out)


def alone(steps: Mapping[str, Step]) -> bool:
    """Returns true if every step works on files that the request names, so that no model is needed."""
    return all(where(s) == "files" and not starts(s) and not needs(s) for s in steps.values())


def check(steps: Mapping[str, Step]) -> list[Problem]:
    """Returns the problems of an order that cannot work; each has the same cure, the corrected list."""
    problems: list[Problem] = []
    before: list[str] = []
    ended = ""  # the step that ended the work on the ranks
    for name, step in steps.items():
        done: set[str] = {steps[n].kind for n in before}
        live = any(where(steps[n]) == "ranks" for n in before)
        for text in (_lacks(name, step, steps, done), _forgets(step, done, live), _too_late(step, ended)):
            if text:
                problems.append(Problem(f"steps.{name}", text, quote(f"steps=[{','.join(_typed(steps))}]")))

        if where(step) != "ranks" and not ended and live:
            ended = name
        before.append(name)
    return problems


def _makers(thing: str) -> list[str]:
    """Returns the verbs that produce ``thing``."""
    return [kind for kind, row in VERBS.items() if row.leaves == thing]


def _made(thing: str, done: Collection[str]) -> bool:
    """Returns true if the verbs in ``done`` have produced ``thing``.

    ``import`` makes a checkpoint as ``save`` does, but it does not contain what is trained after it.
    """
    trained = any(VERBS[kind].trains for kind in done)
    return any(kind in done and not (VERBS[kind].brings and trained) for kind in _makers(thing))


def _lacks(name: str, step: Step, steps: Mapping[str, Step], done: set[str]) -> str:
    thing = needs(step)
    if not thing or _made(thing, done):
        return ""

    maker, *others = _makers(thing)
    kinds = {s.kind for s in steps.values()}
    if maker not in kinds and _made(thing, kinds):
        maker = next(kind for kind in others if kind in kinds)

    if maker in kinds:
        return f"needs {thing}, but {maker!r}, which makes it, comes after {name!r}"
    old = f", and steps.{name}.src names none" if hasattr(step, "src") else ""
    return f"needs {thing}, but there is no {maker!r} step to make one{old}"


def _forgets(step: Step, done: set[str], live: bool) -> str:
    learned = next((kind for kind in done if VERBS[kind].trains), None)
    if loads(step) and learned is not None and not _made(CHECKPOINT, done):
        return f"would overwrite what {learned!r} has just trained"
    return "the ranks start from its result; put it first" if starts(step) and live else ""


def _too_late(step: Step, ended: str) -> str:
    late = where(step) == "ranks" and ended
    return f"needs the ranks, which have ended before {ended!r}; put it before {ended!r}" if late else ""


def _typed(steps: Mapping[str, Step]) -> Iterator[str]:
    """Yields the steps in an order that works, as the user would type them."""
    for name in _righted(steps):
        yield choice(name, steps[name].kind if name in steps else name)


def choice(name: str, kind: str) -> str:
    """Returns how ``steps=[...]`` spells the step ``name``.

    >>> choice("train_2", "train"), choice("again", "train")
    ('train', 'again')
    """
    return kind if name.removeprefix(f"{kind}_").isdigit() else name


def _righted(steps: Mapping[str, Step]) -> tuple[str, ...]:
    """Returns the names in the nearest order that works, with missing steps added."""
    remaining = dict(steps)
    for thing in (TRANSFORMED, EXPORTED, CHECKPOINT):  # the makers of the first two need the last
        kinds = {s.kind for s in remaining.values()}
        if any(needs(s) == thing and not _made(thing, kinds) for s in remaining.values()):
            maker = _makers(thing)[0]
            remaining[maker] = cast(Step, VERBS[maker].settings())

            # what is saved has to come from somewhere
            if thing == CHECKPOINT and not any(_has_weights(s) for s in remaining.values()):
                remaining = {"train": cast(Step, VERBS["train"].settings()), **remaining}

    out: list[str] = []
    done: set[str] = set()
    while remaining:
        name = next(n for n, s in remaining.items() if _may_be_next(s, remaining.values(), done))
        done.add(remaining.pop(name).kind)
        out.append(name)
    return tuple(out)


def _has_weights(step: Step) -> bool:
    """Returns true if the step gives the model weights that are worth saving."""
    return verb(step).trains or (verb(step).brings and not needs(step))


def _may_be_next(step: Step, remaining: Collection[Step], done: set[str]) -> bool:
    thing = needs(step)
    if thing and not _made(thing, done):
        return False
    if any(starts(s) for s in remaining):
        return starts(step)
    if verb(step).trains:
        return all(not loads(s) or needs(s) for s in remaining)
    return where(step) == "ranks" or all(where(s) != "ranks" for s in remaining)


def comes_after(job: Job, key: str, name: str) -> bool:
    """Returns true if the step ``name`` comes after the step that ``key`` names."""
    names = list(job.steps)
    return names.index(key.removeprefix("steps.")) < names.index(name)
