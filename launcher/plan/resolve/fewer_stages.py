"""The smallest change of a request that leaves fewer stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan import resolve
from launcher.plan.cut import uncut_modules
from launcher.plan.cut.inseparable_modules import together, why
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.resolve import pipeline
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.text import many


def too_few(job: Job, sizes: Sizes, model: TracedModel, groups: Sequence[tuple[str, ...]]) -> Problem:
    """Returns the problem; its cure is the smallest change that leaves no more stages than ``groups``."""
    text = f"the model has {many(sum(map(len, groups)), 'module')} with parameters"
    for group in groups:
        if len(group) > 1:
            text = f"{text}; {together(group)} must be on one stage, because {why(model.graph, group)}"
    grouped = any(len(group) != 1 for group in groups)
    if grouped:
        text = f"{text}; that leaves {many(len(groups), 'part')}"
    text = f"{text}, too few for {sizes.virtual} stages"

    for key, changed in _fewer(job, sizes):
        virtual = _virtual(job, changed)
        if virtual is None or virtual > len(groups):
            continue
        if _as_far(model.skeleton, sizes.virtual, virtual, grouped):
            words = [f"{pipeline.KEY}.{name}={_typed(value)}" for name, value in changed.items()]
            return Problem(f"{pipeline.KEY}.{key}", text, " ".join(words))
    return Problem(f"{pipeline.KEY}.stages", f"{text}; use fewer stages")


def _fewer(job: Job, sizes: Sizes) -> list[tuple[str, dict[str, Any]]]:
    """Lists changes of ``parallel.pipeline`` that make fewer stages, smallest first.

    Each comes with the key that the problem is reported for. A change never contains a key that would keep
    its value.
    """
    out: list[tuple[str, dict[str, Any]]] = []
    if sizes.v:
        out.append(("scheduler", {"scheduler": "1f1b"}))
    if job.parallel.pipeline.interleave:
        out.append(("interleave", {"interleave": False}))
    if sizes.v and job.parallel.pipeline.interleave:
        out.append(("scheduler", {"scheduler": "1f1b", "interleave": False}))

    # fewer ranks on the axis; then the same with one virtual stage each, if there are several now
    fewer = range(sizes.grid["pp"] - 1, 0, -1)
    out += [("stages", {"stages": n}) for n in fewer]
    if sizes.v:
        out += [("stages", {"stages": n, "scheduler": "1f1b"}) for n in fewer]
    elif sizes.chunks > 1:
        out += [("stages", {"stages": n, "interleave": False}) for n in fewer]
    return out


def _virtual(job: Job, changed: dict[str, Any]) -> int | None:
    """The number of stages of ``job`` with these changes; ``None`` if it has problems then."""
    pipe = job.parallel.pipeline.model_copy(update=changed)
    other = job.model_copy(update={"parallel": job.parallel.model_copy(update={"pipeline": pipe})})
    sizes, problems = resolve.sizes(other)
    return None if problems or sizes is None else sizes.virtual


def _as_far(skeleton: ModelStructure, now: int, then: int, grouped: bool) -> bool:
    """Returns whether a cut into ``then`` stages divides modules into the same units as one into ``now``.

    Only then does it keep the same modules together.
    """
    return (
        not grouped or then == 1 or uncut_modules.units(skeleton, now) == uncut_modules.units(skeleton, then)
    )


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
