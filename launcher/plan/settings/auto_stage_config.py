"""``stage_config=auto``: the called modules in runs of about as many bytes, cut only where data flows one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.plan.partition import stage_config, stages
from launcher.plan.partition.inseparable import components, together, why
from launcher.plan.partition.sizes import Note, Sizes, sizes
from launcher.plan.settings import fit, legal, switches
from launcher.plan.values.facts import Graph, Skeleton
from launcher.plan.values.text import many

PIPE = "parallel.pipeline"


def automatic(
    job: Job, sz: Sizes, skeleton: Skeleton, graph: Graph, called: Sequence[str]
) -> tuple[dict[str, int], list[Note]]:
    """The stage of each of the ``called`` modules that has parameters. Raises ``RequestError`` for too few."""
    weight = {
        m: sum(p.spec.nbytes for p in skeleton.params if stages.covers(m, stage_config.owner(p.name))) for m in called
    }
    loaded = [m for m in called if weight[m]]
    groups = components(graph, loaded)
    if len(groups) < sz.virtual:
        raise RequestError((_too_few(job, sz, skeleton, graph, groups),))

    runs = stages.balance(tuple(sum(weight[m] for m in g) for g in groups), sz.virtual)
    kept = [
        Note(stage_config.KEY, f"auto: {together(g)} on one stage, for {why(graph, g)}") for g in groups if len(g) > 1
    ]
    note = Note(stage_config.KEY, "auto -> the stages above: balanced by parameter bytes")
    return {m: run for g, run in zip(groups, runs, strict=True) for m in g}, [note, *kept]


def _too_few(job: Job, sz: Sizes, skeleton: Skeleton, graph: Graph, groups: Sequence[tuple[str, ...]]) -> Problem:
    text = f"the model has {many(sum(map(len, groups)), 'module')} with parameters"
    for g in groups:
        if len(g) > 1:
            text = f"{text}; {together(g)} have to be on one stage, for {why(graph, g)}"
    left = "" if all(len(g) == 1 for g in groups) else f"that leaves {many(len(groups), 'part')}"
    text = f"{text}; {left}, too few for {sz.virtual} stages" if left else f"{text}, too few for {sz.virtual} stages"

    for key, changed in _fewer(job, sz):
        if (virtual := _virtual(job, changed)) <= len(groups) and _as_far(skeleton, sz.virtual, virtual, bool(left)):
            return Problem(f"{PIPE}.{key}", text, " ".join(f"{PIPE}.{k}={_typed(v)}" for k, v in changed.items()))
    return Problem(f"{PIPE}.stages", f"{text}; use fewer stages")


def _fewer(job: Job, sz: Sizes) -> list[tuple[str, dict[str, Any]]]:
    """What would make fewer stages: the key to blame, and changes of ``parallel.pipeline``; the smallest change first.

    A key that would keep its value is no change.
    """
    out: list[tuple[str, dict[str, Any]]] = []
    if sz.v:
        out.append(("scheduler", {"scheduler": "1f1b"}))
    if job.parallel.pipeline.interleave:
        out.append(("interleave", {"interleave": False}))
    if sz.v and job.parallel.pipeline.interleave:
        out.append(("scheduler", {"scheduler": "1f1b", "interleave": False}))
    plain = {"scheduler": "1f1b"} if sz.v else {"interleave": False} if sz.chunks > 1 else {}
    out += [("stages", {"stages": n}) for n in range(sz.grid["pp"] - 1, 0, -1)]
    return out + [("stages", {"stages": n, **plain}) for n in range(sz.grid["pp"] - 1, 0, -1) if plain]


def _virtual(job: Job, changed: dict[str, Any]) -> int | float:
    """How many stages ``job`` has with these changes; without end where it is refused."""
    pipe = job.parallel.pipeline.model_copy(update=changed)
    other = job.model_copy(update={"parallel": job.parallel.model_copy(update={"pipeline": pipe})})
    got, found = sizes(other)
    wrong = [*found, *legal.illegal(other, got), *fit.unfit(other, got), *switches.refused(other, got)]
    return float("inf") if wrong or got is None else got.virtual


def _as_far(skeleton: Skeleton, now: int, then: int | float, grouped: bool) -> bool:
    """Whether ``then`` stages look into modules as far as stages do ``now``: what is together stays known."""
    return not grouped or then == 1 or stage_config.units(skeleton, now) == stage_config.units(skeleton, int(then))


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
