"""The order of steps: which need ranks, what each needs from those before it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from launcher.errors import Problem
from launcher.job.schema.steps import Evaluate, Export, Inspect, Load, MergeStrategies, Save, Step, Transform, Verify

Where = Literal["ranks", "alone", "files"]


@dataclass(frozen=True)
class Phase:
    """Consecutive steps in one place: on all ``ranks``, in one process ``alone``, or on ``files`` without torch."""

    where: Where
    steps: tuple[str, ...]


def where(step: Step) -> Where:
    """Where a step runs."""
    if step.kind in ("train", "sync_shared", "save", "load", "certify", "broadcast"):
        return "ranks"
    if isinstance(step, Evaluate):
        return "ranks" if step.of == "run" else "alone"
    return "alone" if step.kind == "sample" or (isinstance(step, Export) and step.check) else "files"


def _needs(step: Step) -> tuple[str, str] | None:
    """What must exist before ``step``, and the step that makes it."""
    if isinstance(step, Transform | Export | MergeStrategies | Verify | Inspect):
        return ("a checkpoint", "save") if step.src is None else None
    if isinstance(step, Load):
        return ("a checkpoint", "save") if step.path is None else None
    if isinstance(step, Evaluate) and step.of == "transformed":
        return "a transformed checkpoint", "transform"
    if step.kind == "sample" or (isinstance(step, Evaluate) and step.of == "exported"):
        return "an exported model", "export"
    return None


def _made(need: tuple[str, str], done: Collection[str]) -> bool:
    """``import`` leaves a checkpoint as ``save`` does, but not of what is learned after it."""
    return need[1] in done or (need[1] == "save" and "import" in done and "train" not in done)


def alone(steps: Mapping[str, Step]) -> bool:
    """Whether every step works on files that the request names: no model has a part in it."""
    return all(where(s) == "files" and s.kind != "import" and _needs(s) is None for s in steps.values())


def phases(steps: Mapping[str, Step]) -> tuple[Phase, ...]:
    """Group ``steps``, in order, by where they run."""
    out: list[Phase] = []
    for name, step in steps.items():
        if out and out[-1].where == where(step):
            out[-1] = Phase(out[-1].where, (*out[-1].steps, name))
        else:
            out.append(Phase(where(step), (name,)))
    return tuple(out)


def check(steps: Mapping[str, Step]) -> list[Problem]:
    """Steps in an order that cannot work. Every cure is the same: the whole list, put right."""
    found: list[Problem] = []
    before: list[str] = []
    ended = ""
    for name, step in steps.items():
        done: set[str] = {steps[n].kind for n in before}
        live = any(where(steps[n]) == "ranks" for n in before)
        for text in (_lacks(name, step, steps, done), _forgets(step, done, live), _too_late(step, ended)):
            if text:
                found.append(Problem(f"steps.{name}", text, quote(f"steps=[{','.join(_righted(steps))}]")))
        if where(step) != "ranks" and not ended and live:
            ended = name
        before.append(name)
    return found


def _lacks(name: str, step: Step, steps: Mapping[str, Step], done: set[str]) -> str:
    need = _needs(step)
    if need is None or _made(need, done):
        return ""
    thing, maker = need
    kinds = {s.kind for s in steps.values()}
    if maker not in kinds and _made(need, kinds):
        maker = "import"
    if maker in kinds:
        return f"needs {thing}, which {maker!r} makes, and it comes after {name!r}"
    old = f", nor an old one named by steps.{name}.src" if hasattr(step, "src") else ""
    return f"needs {thing}, which {maker!r} makes, and no {maker!r} step is asked for{old}"


def _forgets(step: Step, done: set[str], live: bool) -> str:
    if step.kind == "load" and "train" in done and "save" not in done:
        return "would overwrite what 'train' has just learned"
    return "the ranks start from what it brings; put it before them" if step.kind == "import" and live else ""


def _too_late(step: Step, ended: str) -> str:
    late = where(step) == "ranks" and ended
    return f"needs the ranks, which have ended before {ended!r}; put it before {ended!r}" if late else ""


def _righted(steps: Mapping[str, Step]) -> tuple[str, ...]:
    """The names in the nearest order that works, with the steps that were missing."""
    left = dict(steps)
    for maker in (Transform(), Export(), Save()):  # the first two need the last
        kinds = {s.kind for s in left.values()}
        if any((need := _needs(s)) and need[1] == maker.kind and not _made(need, kinds) for s in left.values()):
            left[maker.kind] = maker
    out: list[str] = []
    done: set[str] = set()
    while left:
        name = next(n for n, s in left.items() if _may_be_next(s, left.values(), done))
        done.add(left.pop(name).kind)
        out.append(name)
    return tuple(out)


def _may_be_next(step: Step, left: Collection[Step], done: set[str]) -> bool:
    need = _needs(step)
    if need is not None and not _made(need, done):
        return False
    if step.kind == "import" or any(s.kind == "import" for s in left):
        return step.kind == "import"
    if step.kind == "train":
        return all(s.kind != "load" or _needs(s) for s in left)
    return where(step) == "ranks" or all(where(s) != "ranks" for s in left)
