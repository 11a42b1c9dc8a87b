"""The order in which a stage gathers its groups of sharded weights: the same on every rank, for any data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.communication.buckets_and_gathers import GatherGroup
from launcher.plan.cut.stages import covers
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.note import Note
from launcher.plan.values.text import some


@dataclass(frozen=True)
class Visit:
    """The moment when a forward begins to use a group of the plan, or is done with it.

    A backward makes the same visits in reverse.
    """

    group: int
    begins: bool


@dataclass(frozen=True)
class Gathering:
    """One group in the order in which the first forwards of a rank use them.

    ``until`` limits how far the rank gathers ahead: when it uses this group, it has begun to gather the first
    ``until`` groups of its order and no more. ``early``: the group is gathered before the forward of its
    stage begins, because that forward replaces its weights by other tensors.
    """

    group: int
    until: int
    early: bool = False


AHEAD = 1 << 26
"""Bytes to gather ahead of use. The next group is always gathered ahead, however large it is."""


def gatherings(
    groups: tuple[GatherGroup, ...],
    visits: tuple[tuple[Visit, ...], ...],
    rank_stages: tuple[int, ...],
    ahead: int | None,
    swapped: tuple[str, ...] = (),
) -> tuple[Gathering, ...]:
    """Returns the order in which a rank gathers the groups of its stages, each once a step.

    The first forward of a stage needs the output of the stage before it, so stages come in order.

    Args:
        groups: all groups of the plan.
        visits: one sequence per stage.
        rank_stages: the stages of the rank.
        ahead: bytes to gather before they are used; ``None`` to gather nothing ahead.
        swapped: modules that are called with other parameters than their own.
    """
    order = [i for stage in rank_stages for i in _first_uses(groups, visits[stage], stage)]

    sizes = [groups[i].nbytes for i in order]

    out, until = [], 0
    for n, i in enumerate(order):
        until = max(until, n + 1)
        while ahead is not None and until < len(order) and _fits(sizes[n + 1 : until + 1], ahead):
            until += 1
        early = any(covers(g, m) for g in groups[i].modules for m in swapped)
        out.append(Gathering(i, until, early))
    return tuple(out)


def _fits(sizes: list[int], ahead: int) -> bool:
    """Returns true if groups of these sizes may all be gathered ahead at the same time."""
    return len(sizes) == 1 or sum(sizes) <= ahead


def _first_uses(groups: tuple[GatherGroup, ...], visits: tuple[Visit, ...], stage: int) -> list[int]:
    """Returns the groups of a stage as its forward uses them, then those that it did not use in the trace."""
    used = dict.fromkeys(v.group for v in visits if v.begins)
    rest = [i for i, g in enumerate(groups) if g.stage == stage and i not in used]
    return [*used, *rest]


def visits(groups: tuple[GatherGroup, ...], stages: int, graph: Graph) -> tuple[tuple[Visit, ...], ...]:
    """Returns the visits of each stage, in the order in which its modules are called."""
    return tuple(tuple(_visits(groups, s, graph)) for s in range(stages))


def _visits(groups: tuple[GatherGroup, ...], stage: int, graph: Graph) -> Iterator[Visit]:
    """Yields the visits of one stage; as in FSDP2, a group is in use until each of its modules has run."""
    home = {m: i for i, g in enumerate(groups) if g.stage == stage for m in g.modules}
    root = home.pop("", None)
    if root is not None:
        yield Visit(root, True)

    waiting: dict[int, set[str]] = {}  # modules that have not run yet, of the groups in use
    for module, begins in graph.order:
        at = home.get(module)
        if at is None:
            continue
        if begins and not waiting.get(at):
            waiting[at] = set(groups[at].modules)
            yield Visit(at, True)
        if not begins and module in waiting[at]:
            waiting[at].remove(module)
            if not waiting[at]:
                yield Visit(at, False)

    yield from (Visit(at, False) for at, modules in waiting.items() if modules)
    if root is not None:
        yield Visit(root, False)


def notes(graph: Graph, params: tuple[Placed, ...]) -> list[Note]:
    """Returns a note about modules that read tensor values and contain sharded weights, if there are any."""
    names = [n for p in params if p.sharded for n in p.names]
    modules = [m or "the model" for m in graph.value_readers if any(covers(m, n) for n in names)]
    if not modules:
        return []
    verb, whose = ("looks", "its") if len(modules) == 1 else ("look", "their")
    text = f"{some(modules)} {verb} at data, so ranks may run different code: every rank gathers all"
    return [Note("parallel.hsdp", f"{text} {whose} weights, and missing gradients count as zeros")]
