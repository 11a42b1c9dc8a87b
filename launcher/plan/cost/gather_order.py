"""In which order a stage gathers its groups of sharded weights: the same on every rank, for any data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.cost.fusion import Group
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Note
from launcher.plan.partition.stages import covers
from launcher.plan.values.facts import Graph
from launcher.plan.values.text import some


@dataclass(frozen=True)
class Visit:
    """A forward begins to use group ``group`` of the plan, or is done with it; a backward in reverse."""

    group: int
    begins: bool


@dataclass(frozen=True)
class Gathering:
    """A group in its turn, as the first forwards of a rank use them.

    By the time that it is used the rank has begun to gather the first ``until`` groups of its turns, and no
    more: so far ahead of use, and no further. ``early``: it is there before its stage's forward begins, which
    puts other tensors in the place of its weights.
    """

    group: int
    until: int
    early: bool = False


AHEAD = 1 << 26
"""Bytes that are gathered ahead of use; the next group always is, however large."""


def gatherings(
    groups: tuple[Group, ...],
    visits: tuple[tuple[Visit, ...], ...],
    held: tuple[int, ...],
    ahead: int | None,
    swapped: tuple[str, ...] = (),
) -> tuple[Gathering, ...]:
    """The turns of a rank that gathers for the stages ``held`` once a step.

    A stage's first forward needs that of the stage before, so stages come in order. ``ahead``: so many bytes
    before they are used, ``None`` for none at all. ``swapped``: modules that are called with other parameters
    than theirs.
    """
    order = [i for stage in held for i in _first_uses(groups, visits[stage], stage)]

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
    """Whether what has these sizes may wait for its use at once."""
    return len(sizes) == 1 or sum(sizes) <= ahead


def _first_uses(groups: tuple[Group, ...], visits: tuple[Visit, ...], stage: int) -> list[int]:
    """The groups of a stage as its forward uses them; after them what it was not seen to use."""
    used = dict.fromkeys(v.group for v in visits if v.begins)
    rest = [i for i, g in enumerate(groups) if g.stage == stage and i not in used]
    return [*used, *rest]


def visits(groups: tuple[Group, ...], stages: int, graph: Graph) -> tuple[tuple[Visit, ...], ...]:
    """Of each stage, in the order in which its modules are called."""
    return tuple(tuple(_visits(groups, s, graph)) for s in range(stages))


def _visits(groups: tuple[Group, ...], stage: int, graph: Graph) -> Iterator[Visit]:
    """As FSDP2 does it: a group is in use until each of its modules has run."""
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
    """What is said of modules that look at data and have sharded weights inside."""
    names = [n for p in params if p.sharded for n in p.names]
    found = [m or "the model" for m in graph.looks if any(covers(m, n) for n in names)]
    if not found:
        return []
    verb, whose = ("looks", "its") if len(found) == 1 else ("look", "their")
    text = f"{some(found)} {verb} at data, so ranks may differ in what runs there: on every rank all of"
    return [Note("parallel.hsdp", f"{text} {whose} weights are gathered, and missing gradients are zeros")]
