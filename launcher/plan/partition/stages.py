"""What each pipeline stage runs, holds, receives and sends, from the stage of every named module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from launcher.errors import Problem
from launcher.plan.partition import aliasing
from launcher.plan.partition.inseparable import components, together, why
from launcher.plan.partition.masks import masks
from launcher.plan.partition.stage_config import KEY, owner
from launcher.plan.values.facts import Graph, Node, Segment, Skeleton, TensorSpec


@dataclass(frozen=True)
class Stage:
    """``nodes`` in execution order; ``receives`` are the values that cross the boundary before it.

    ``sends``: those that cross the one after it.

    ``flops`` of a forward, and those ``deferred`` to the second half of a backward, where there are halves.
    """

    index: int
    nodes: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    modules: tuple[str, ...]
    params: tuple[str, ...]
    flops: int
    saved: int
    deferred: int = 0


def covers(module: str, name: str) -> bool:
    """Whether ``name`` is ``module`` or lies below it; the root "" covers everything."""
    return not module or name == module or name.startswith(module + ".")


@lru_cache(maxsize=8192)  # plans of one search ask for the same names
def around(name: str) -> tuple[str, ...]:
    """All that covers ``name``, outermost first: of many names quicker than to ask each pair.

    >>> around("layers.0.mlp")
    ('', 'layers', 'layers.0', 'layers.0.mlp')
    """
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:n]) for n in range(len(parts) + 1))


def place(graph: Graph, told: Mapping[str, int], last: int) -> tuple[dict[str, int], list[Problem]]:
    """Stage of every node: modules where told, glue at the latest of its inputs and told parameters.

    Data only flows forward. ``told`` names modules, and parameters that the glue uses.
    """
    at, edges = _placed(graph, told, last)
    return at, _against(graph, told, last, edges) + _unheard(graph, at, told)


Edge = tuple[Node, int, Node, int]
"""A node, its stage, what it needs, and the later stage that this is on."""


def _placed(graph: Graph, told: Mapping[str, int], last: int) -> tuple[dict[str, int], list[Edge]]:
    """Stage of every node, and where data would flow backwards."""
    at: dict[str, int] = {}
    found: list[Edge] = []
    changed = frozenset[int]().union(*(n.writes for n in graph.nodes if n.kind == "glue"))
    for node in graph.nodes:
        values = [m for m in node.inputs if graph[m].kind != "param"]
        latest = max(values, key=lambda m: at[m], default=None)
        floor = at[latest] if latest else 0

        # where it is told to be, or where the latest of its inputs is
        at[node.name] = floor
        if node.kind == "output":
            at[node.name] = last
        elif node.kind == "module":
            at[node.name] = told.get(node.target, floor)
        elif node.kind == "glue":
            at[node.name] = max(floor, _wanted(graph, node, told, changed))

        if at[node.name] < floor and latest:
            found.append((node, at[node.name], graph[latest], floor))
    return at, found


def _wanted(graph: Graph, node: Node, told: Mapping[str, int], changed: frozenset[int]) -> int:
    """The stage told for a parameter that glue uses, or of the module whose tensors glue changes there."""
    used = [told.get(graph[m].target, 0) for m in node.inputs if graph[m].kind == "param"]
    mine = (node.reads | node.lies) & changed
    whose = [m for m in graph.nodes if m.kind == "module" and mine & aliasing.own(graph, m)] if mine else []
    return max([0, *used, *(told.get(m.target, 0) for m in whose)])


def _against(graph: Graph, told: Mapping[str, int], last: int, edges: list[Edge]) -> list[Problem]:
    """One problem an edge; of modules that no cut can separate, one for all of their edges."""
    if not edges:
        return []

    groups = components(graph, list(dict.fromkeys(n.target for n in graph.nodes if n.target in told)))
    problems: dict[tuple[str, ...], Problem] = {}
    for node, stage, source, floor in edges:
        group = next(g for g in groups if node.target in g)
        if len(group) == 1:
            problems[node.name, ""] = _backwards(node, stage, source, floor)
        elif group not in problems:
            output = f"the output of {_what(source)} on stage {floor}"
            text = f"{node.target!r} is on stage {stage} but needs {output}"
            text = f"{text}; {together(group)} have to be on one stage, for {why(graph, group)}"
            cure = _gathered(graph, told, last, group)
            if not cure:
                text = f"{text}: use fewer stages, so that they can be"
            problems[group] = Problem(KEY, text, cure)

    # where the cures of single modules do not do together, one that names all of them
    single = {n.target: floor for n, _, _, floor in edges if (n.name, "") in problems}
    if single and not _works(graph, {**told, **single}, last):
        cure = _in_order(graph, told, last, groups)
        for key in problems:
            if key[1:] == ("",):
                problems[key] = replace(problems[key], cure=cure)
    return list(problems.values())


def _works(graph: Graph, told: Mapping[str, int], last: int) -> bool:
    at, edges = _placed(graph, told, last)
    return not edges and not _unheard(graph, at, told) and {*told.values()} >= {*range(last + 1)}


def _in_order(graph: Graph, told: Mapping[str, int], last: int, groups: Sequence[Sequence[str]]) -> str:
    """The ``stage_config`` that gives modules the same stages in rising order; "" where there is none."""
    modules = [m for g in groups for m in g]
    now = dict(zip(modules, sorted(told[m] for m in modules), strict=True))
    moved = {m: s for m, s in now.items() if told[m] != s}
    works = len(moved) < 7 and _works(graph, {**told, **now}, last)
    return " ".join(f"{KEY}.{m}={s}" for m, s in moved.items()) if works else ""


def _gathered(graph: Graph, told: Mapping[str, int], last: int, group: tuple[str, ...]) -> str:
    """What puts a group on one of its stages, the fewest moves first; "" where that leaves a stage empty."""
    for stage in sorted({told[m] for m in group}, key=lambda s: (sum(told[m] != s for m in group), s)):
        moved = {m: stage for m in group if told[m] != stage}
        if _works(graph, {**told, **moved}, last):
            return " ".join(f"{KEY}.{m}={stage}" for m in moved)
    return ""


def _backwards(node: Node, stage: int, source: Node, floor: int) -> Problem:
    key = f"{KEY}.{node.target}"
    text = f"{node.target!r} is on stage {stage} but needs the output of {_what(source)} on stage {floor}"
    return Problem(key, f"{text}; data flows from lower to higher stages only", f"{key}={floor}")


def _unheard(graph: Graph, at: Mapping[str, int], told: Mapping[str, int]) -> list[Problem]:
    """Parameters that the glue uses on other stages only than the one they were told to be on."""
    used: dict[str, list[int]] = {}
    for node in graph.nodes:
        for m in node.inputs:
            if graph[m].kind == "param" and graph[m].target in told:
                used.setdefault(graph[m].target, []).append(at[node.name])

    problems = []
    for name, stages in used.items():
        if told[name] not in stages:
            text = f"{name!r} is on stage {told[name]} but is first used on stage {min(stages)}"
            problems.append(Problem(f"{KEY}.{name}", text, f"{KEY}.{name}={min(stages)}"))
    return problems


def cut(
    graph: Graph, at: Mapping[str, int], stages: int, skeleton: Skeleton
) -> tuple[tuple[Stage, ...], list[Problem]]:
    """The stages that ``at`` makes of ``graph``, or the edges that cannot cross."""
    runs: list[set[str]] = [set() for _ in range(stages)]
    wants: list[set[str]] = [set() for _ in range(stages)]
    problems: list[Problem] = []
    again = masks(graph)

    def need(name: str, stage: int, user: Node) -> None:
        node = graph[name]
        if name in runs[stage]:
            return

        # parameters are held, tensors of earlier stages received, but for masks
        if node.kind == "param":
            runs[stage].add(name)
        elif at[name] < stage and name in again:
            runs[stage].add(name)
            for m in node.inputs:
                need(m, stage, node)
        elif at[name] < stage and node.out is not None:
            wants[stage].add(name)

        # a number or a shape is cheap, so worked out again here
        elif at[name] < stage and node.kind == "glue":
            runs[stage].add(name)
            for m in node.inputs:
                need(m, stage, node)
        elif at[name] < stage:
            text = f"{_what(node)} on stage {at[name]} hands something that is no tensor to {_what(user)}"
            problems.append(Problem(KEY, f"{text} on stage {stage}; put both on one stage"))

    for node in graph.nodes:
        if node.kind != "param":
            runs[at[node.name]].add(node.name)
            for m in node.inputs:
                need(m, at[node.name], node)

    problems += aliasing.problems(graph, at)
    crossing = [_crossing(graph, at, wants, s) for s in range(stages + 1)]
    order = [tuple(n.name for n in graph.nodes if n.name in runs[s]) for s in range(stages)]
    made = tuple(
        _stage(graph, skeleton, s, order[s], receives=crossing[s], sends=crossing[s + 1])
        for s in range(stages)
    )
    return made, problems or _homeless(skeleton, made)


def _homeless(skeleton: Skeleton, stages: tuple[Stage, ...]) -> list[Problem]:
    """Tensors that no stage holds, for nothing that runs has them: they would be in no checkpoint."""
    held = {name for s in stages for name in s.params}
    same = {p.same_as for p in skeleton.params if p.name in held}
    lost = [p.name for p in skeleton.params if p.same_as not in same]
    if not lost:
        return []
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    text = f"the forward never uses {', '.join(lost[:3])}{more}, which no stage of the pipeline would hold"
    cure = f"parallel.pipeline.stages=1 {KEY}=auto"
    return [Problem("model", f"{text}; take it out of the model, or use one stage", cure)]


def _crossing(graph: Graph, at: Mapping[str, int], wants: list[set[str]], stage: int) -> tuple[str, ...]:
    """Values made before ``stage`` that it or a later one uses: they travel over the boundary before it."""
    later = set().union(*wants[stage:])
    return tuple(n.name for n in graph.nodes if n.name in later and at[n.name] < stage)


def _stage(
    g: Graph,
    skeleton: Skeleton,
    index: int,
    nodes: tuple[str, ...],
    *,
    receives: tuple[str, ...],
    sends: tuple[str, ...],
) -> Stage:
    inside = [g[n] for n in nodes]

    # it holds what its modules have, and what its glue uses
    modules = tuple(dict.fromkeys(n.target for n in inside if n.kind == "module"))
    direct = {n.target for n in inside if n.kind == "param"}
    called = frozenset(modules)
    held = tuple(
        p.name for p in skeleton.params if p.name in direct or not called.isdisjoint(around(owner(p.name)))
    )

    return Stage(
        index=index,
        nodes=nodes,
        receives=receives,
        sends=sends,
        modules=modules,
        params=held,
        flops=sum(n.flops for n in inside),
        saved=sum(n.saved for n in inside),
        deferred=sum(n.backward.deferred.flops for n in inside),
    )


def segments(stage: Stage, graph: Graph, whole: Graph) -> tuple[Segment, ...]:
    """The stage's parts in order, as ``graph`` runs them: ``whole``, or a piece of its sequences."""
    heavy = [n for n in stage.nodes if whole[n].saved or whole[n].backward.work]
    return graph.segments or tuple(_segment(graph[n]) for n in heavy)


def _segment(n: Node) -> Segment:
    module = n.target if n.kind == "module" else ""
    made = sum(t.nbytes for t in n.out or ())
    return Segment(module, saved=n.saved, backward=n.backward, made=made, left=n.left)


def _what(node: Node) -> str:
    return repr(node.target) if node.kind == "module" else f"{node.kind} {node.target or node.name!r}"


@dataclass(frozen=True)
class Crossing:
    """A value that travels over a stage boundary: ``specs`` of its tensors, ``packed`` when they are a tuple.

    ``trains``: a gradient comes back for it. One that is only looked at must get none, not even zeros: where
    nothing comes back to a parameter an optimizer leaves it alone.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    packed: bool
    trains: bool = True


def boundary(graph: Graph, stages: tuple[Stage, ...], index: int) -> tuple[Crossing, ...]:
    """What travels from stage ``index`` to the next."""
    later = [graph[n] for s in stages[index + 1 :] for n in s.nodes]
    trains = frozenset[str]().union(*(n.trains for n in later))
    return tuple(Crossing(n, graph[n].out or (), graph[n].packed, n in trains) for n in stages[index].sends)
