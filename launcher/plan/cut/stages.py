"""What each stage runs, sends and receives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from launcher.errors import Problem
from launcher.plan.cut import inplace_changes
from launcher.plan.cut.inseparable_modules import components, together, why
from launcher.plan.cut.recomputed_masks import masks
from launcher.plan.values.model_graph import Graph, ModelStructure, Node, Segment
from launcher.plan.values.module_names import STAGE_CONFIG, owner
from launcher.plan.values.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Stage:
    """A pipeline stage.

    ``nodes`` are in execution order. ``receives`` are the values that cross the boundary before the stage,
    ``sends`` those that cross the one after it. ``flops`` are those of a forward; ``deferred`` are the flops
    that a split backward leaves to its second half.
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
    """Returns true if ``name`` is ``module`` or lies below it; the root "" covers everything."""
    return not module or name == module or name.startswith(module + ".")


@lru_cache(maxsize=8192)  # the plans of one search use the same names
def around(name: str) -> tuple[str, ...]:
    """Returns all names that cover ``name``, outermost first; for many names this is faster than ``covers``.

    >>> around("layers.0.mlp")
    ('', 'layers', 'layers.0', 'layers.0.mlp')
    """
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:n]) for n in range(len(parts) + 1))


def place(graph: Graph, requested: Mapping[str, int], last: int) -> tuple[dict[str, int], list[Problem]]:
    """Returns the stage of every node, and the problems of the requested stages.

    Modules are where ``requested`` puts them; glue is on the latest stage of its inputs and parameters. Data
    only flows forward.

    Args:
        graph: the traced forward.
        requested: the requested stage of modules, and of parameters that the glue uses.
        last: the last stage, which has the output.
    """
    at, edges = _placed(graph, requested, last)
    return at, _against(graph, requested, last, edges) + _unheard(graph, at, requested)


Edge = tuple[Node, int, Node, int]
"""A node, its stage, an input that it needs, and the later stage of that input."""


def _placed(graph: Graph, requested: Mapping[str, int], last: int) -> tuple[dict[str, int], list[Edge]]:
    """Returns the stage of every node, and the edges on which data would flow backwards."""
    at: dict[str, int] = {}
    edges: list[Edge] = []
    changed = frozenset[int]().union(*(n.writes for n in graph.nodes if n.kind == "glue"))
    for node in graph.nodes:
        values = [m for m in node.inputs if graph[m].kind != "param"]
        latest = max(values, key=lambda m: at[m], default=None)
        floor = at[latest] if latest else 0

        # the requested stage, or that of the latest input
        at[node.name] = floor
        if node.kind == "output":
            at[node.name] = last
        elif node.kind == "module":
            at[node.name] = requested.get(node.target, floor)
        elif node.kind == "glue":
            at[node.name] = max(floor, _latest_stage(graph, node, requested, changed))

        if at[node.name] < floor and latest:
            edges.append((node, at[node.name], graph[latest], floor))
    return at, edges


def _latest_stage(graph: Graph, node: Node, requested: Mapping[str, int], changed: frozenset[int]) -> int:
    """Returns the latest stage that parameters and changed tensors require of glue.

    Glue must be on the stage of parameters that it uses, and of modules whose tensors it uses if glue changes
    them.
    """
    used = [requested.get(graph[m].target, 0) for m in node.inputs if graph[m].kind == "param"]
    mine = (node.reads | node.lies) & changed
    whose = (
        [m for m in graph.nodes if m.kind == "module" and mine & inplace_changes.own(graph, m)]
        if mine
        else []
    )
    return max([0, *used, *(requested.get(m.target, 0) for m in whose)])


def _against(graph: Graph, requested: Mapping[str, int], last: int, edges: list[Edge]) -> list[Problem]:
    """Returns one problem per edge, but only one for all edges of modules that no cut can separate."""
    if not edges:
        return []

    groups = components(graph, list(dict.fromkeys(n.target for n in graph.nodes if n.target in requested)))
    problems: dict[tuple[str, ...], Problem] = {}
    for node, stage, source, floor in edges:
        group = next(g for g in groups if node.target in g)
        if len(group) == 1:
            problems[node.name, ""] = _backwards(node, stage, source, floor)
        elif group not in problems:
            output = f"the output of {source.label} on stage {floor}"
            text = f"{node.target!r} is on stage {stage} but needs {output}"
            text = f"{text}; {together(group)} must be on one stage, because {why(graph, group)}"
            cure = _gathered(graph, requested, last, group)
            if not cure:
                text = f"{text}; use fewer stages"
            problems[group] = Problem(STAGE_CONFIG, text, cure)

    # if the cures of single modules do not work together, one cure names all of them
    single = {n.target: floor for n, _, _, floor in edges if (n.name, "") in problems}
    if single and not _works(graph, {**requested, **single}, last):
        cure = _in_order(graph, requested, last, groups)
        for key in problems:
            if key[1:] == ("",):
                problems[key] = replace(problems[key], cure=cure)
    return list(problems.values())


def _works(graph: Graph, requested: Mapping[str, int], last: int) -> bool:
    at, edges = _placed(graph, requested, last)
    return not edges and not _unheard(graph, at, requested) and {*requested.values()} >= {*range(last + 1)}


def _in_order(graph: Graph, requested: Mapping[str, int], last: int, groups: Sequence[Sequence[str]]) -> str:
    """Returns the overrides that put the stages of modules in ascending order; "" if that does not work."""
    modules = [m for g in groups for m in g]
    now = dict(zip(modules, sorted(requested[m] for m in modules), strict=True))
    moved = {m: s for m, s in now.items() if requested[m] != s}
    works = len(moved) < 7 and _works(graph, {**requested, **now}, last)
    return " ".join(f"{STAGE_CONFIG}.{m}={s}" for m, s in moved.items()) if works else ""


def _gathered(graph: Graph, requested: Mapping[str, int], last: int, group: tuple[str, ...]) -> str:
    """Returns the overrides that put a group on one of its stages, with the fewest moves.

    Returns "" if none works, because a stage would be empty for example.
    """
    for stage in sorted(
        {requested[m] for m in group}, key=lambda s: (sum(requested[m] != s for m in group), s)
    ):
        moved = {m: stage for m in group if requested[m] != stage}
        if _works(graph, {**requested, **moved}, last):
            return " ".join(f"{STAGE_CONFIG}.{m}={stage}" for m in moved)
    return ""


def _backwards(node: Node, stage: int, source: Node, floor: int) -> Problem:
    key = f"{STAGE_CONFIG}.{node.target}"
    text = f"{node.target!r} is on stage {stage} but needs the output of {source.label} on stage {floor}"
    return Problem(key, f"{text}; data flows from lower to higher stages only", f"{key}={floor}")


def _unheard(graph: Graph, at: Mapping[str, int], requested: Mapping[str, int]) -> list[Problem]:
    """Returns the problems of parameters that glue uses only on other stages than the requested one."""
    used: dict[str, list[int]] = {}
    for node in graph.nodes:
        for m in node.inputs:
            if graph[m].kind == "param" and graph[m].target in requested:
                used.setdefault(graph[m].target, []).append(at[node.name])

    problems = []
    for name, stages in used.items():
        if requested[name] not in stages:
            text = f"{name!r} is on stage {requested[name]} but is first used on stage {min(stages)}"
            problems.append(Problem(f"{STAGE_CONFIG}.{name}", text, f"{STAGE_CONFIG}.{name}={min(stages)}"))
    return problems


def cut(
    graph: Graph, at: Mapping[str, int], stages: int, skeleton: ModelStructure
) -> tuple[tuple[Stage, ...], list[Problem]]:
    """Returns the stages into which ``at`` cuts ``graph``, and problems such as edges that cannot cross."""
    runs: list[set[str]] = [set() for _ in range(stages)]
    wants: list[set[str]] = [set() for _ in range(stages)]
    problems: list[Problem] = []
    again = masks(graph)

    def need(name: str, stage: int, user: Node) -> None:
        node = graph[name]
        if name in runs[stage]:
            return

        # the stage holds parameters, computes masks again, and receives other tensors of earlier stages
        if node.kind == "param":
            runs[stage].add(name)
        elif at[name] < stage and name in again:
            runs[stage].add(name)
            for m in node.inputs:
                need(m, stage, node)
        elif at[name] < stage and node.out is not None:
            wants[stage].add(name)

        # a number or a shape is cheap, so it is computed again here
        elif at[name] < stage and node.kind == "glue":
            runs[stage].add(name)
            for m in node.inputs:
                need(m, stage, node)
        elif at[name] < stage:
            text = f"{node.label} on stage {at[name]} passes a value that is not a dense tensor"
            text += f" to {user.label} on stage {stage}"
            problems.append(Problem(STAGE_CONFIG, f"{text}; put both on one stage"))

    for node in graph.nodes:
        if node.kind != "param":
            runs[at[node.name]].add(node.name)
            for m in node.inputs:
                need(m, at[node.name], node)

    problems += inplace_changes.problems(graph, at)
    crossing = [_crossing(graph, at, wants, s) for s in range(stages + 1)]
    order = [tuple(n.name for n in graph.nodes if n.name in runs[s]) for s in range(stages)]
    made = tuple(
        _stage(graph, skeleton, s, order[s], receives=crossing[s], sends=crossing[s + 1])
        for s in range(stages)
    )
    return made, problems or _homeless(skeleton, made)


def _homeless(skeleton: ModelStructure, stages: tuple[Stage, ...]) -> list[Problem]:
    """Returns a problem if no stage holds some tensors, because no module that runs has them.

    They would be missing in checkpoints.
    """
    placed_names = {name for s in stages for name in s.params}
    same = {p.same_as for p in skeleton.params if p.name in placed_names}
    lost = [p.name for p in skeleton.params if p.same_as not in same]
    if not lost:
        return []
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    names = f"{', '.join(lost[:3])}{more}"
    them = "it" if len(lost) == 1 else "them"
    text = f"the forward never uses {names}, so no stage of the pipeline would hold {them}"
    cure = f"parallel.pipeline.stages=1 {STAGE_CONFIG}=auto"
    return [Problem("model", f"{text}; remove {them} from the model, or use one stage", cure)]


def _crossing(graph: Graph, at: Mapping[str, int], wants: list[set[str]], stage: int) -> tuple[str, ...]:
    """Returns the values that cross the boundary before ``stage``.

    Earlier stages compute them; ``stage`` or later ones use them.
    """
    later = set().union(*wants[stage:])
    return tuple(n.name for n in graph.nodes if n.name in later and at[n.name] < stage)


def _stage(
    g: Graph,
    skeleton: ModelStructure,
    index: int,
    nodes: tuple[str, ...],
    *,
    receives: tuple[str, ...],
    sends: tuple[str, ...],
) -> Stage:
    inside = [g[n] for n in nodes]

    # the stage holds the parameters of its modules and those that its glue uses
    modules = tuple(dict.fromkeys(n.target for n in inside if n.kind == "module"))
    direct = {n.target for n in inside if n.kind == "param"}
    called = frozenset(modules)
    params = tuple(
        p.name for p in skeleton.params if p.name in direct or not called.isdisjoint(around(owner(p.name)))
    )

    return Stage(
        index=index,
        nodes=nodes,
        receives=receives,
        sends=sends,
        modules=modules,
        params=params,
        flops=sum(n.flops for n in inside),
        saved=sum(n.saved for n in inside),
        deferred=sum(n.backward.deferred.flops for n in inside),
    )


def segments(stage: Stage, graph: Graph, full_graph: Graph) -> tuple[Segment, ...]:
    """Returns the segments of a stage in the order in which ``graph`` runs them.

    ``graph`` is ``full_graph``, or that of a piece of its sequences.
    """
    heavy = [n for n in stage.nodes if full_graph[n].saved or full_graph[n].backward.work]
    return graph.segments or tuple(_segment(graph[n]) for n in heavy)


def _segment(n: Node) -> Segment:
    module = n.target if n.kind == "module" else ""
    made = sum(t.nbytes for t in n.out or ())
    return Segment(module, saved=n.saved, backward=n.backward, made=made, left=n.left)


@dataclass(frozen=True)
class BoundaryTensor:
    """A value that crosses a stage boundary: ``specs`` of its tensors, ``packed`` if they are a tuple.

    ``trains``: a gradient comes back for it. A value that is only read without gradients must get none, not
    even zeros, because an optimizer skips a parameter only if it has no gradient.

    ``idle``: the numbers of tensors that get none although others of the value do.

    ``dims``: for each tensor the order of its dimensions while it is sent. It is the order of its memory in
    one process, such as (0, 2, 3, 1) for channels last; () stands for the order of its indices.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    packed: bool
    trains: bool = True
    dims: tuple[tuple[int, ...], ...] = ()
    idle: tuple[int, ...] = ()

    @property
    def gradients(self) -> tuple[bool, ...]:
        """For each tensor, whether a gradient comes back for it; integers have none."""
        return tuple(
            self.trains and i not in self.idle and "float" in s.dtype for i, s in enumerate(self.specs)
        )

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """``dims`` of each tensor."""
        return self.dims or ((),) * len(self.specs)

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """The specs of the tensors as they are sent."""
        pairs = zip(self.specs, self.orders, strict=True)
        return tuple(permuted(s, dims) if dims else s for s, dims in pairs)

    def with_sent(self, sent: Iterable[TensorSpec]) -> BoundaryTensor:
        """Returns a copy whose tensors have the specs ``sent`` while they are sent."""
        pairs = zip(sent, self.orders, strict=True)
        return replace(self, specs=tuple(permuted(s, inverse(dims)) if dims else s for s, dims in pairs))


def permuted(spec: TensorSpec, dims: tuple[int, ...]) -> TensorSpec:
    """Returns ``spec`` with its dimensions in the order ``dims``."""
    return replace(spec, shape=tuple(spec.shape[d] for d in dims))


def inverse(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the permutation that undoes ``dims``.

    >>> inverse((0, 2, 3, 1))
    (0, 3, 1, 2)
    """
    return tuple(sorted(range(len(dims)), key=dims.__getitem__))


def boundary(
    graph: Graph, stages: tuple[Stage, ...], index: int, *, as_indexed: bool = False
) -> tuple[BoundaryTensor, ...]:
    """Returns the values that stage ``index`` sends to the next.

    ``as_indexed``: all are sent contiguous, whatever the order of their memory, as pieces of sequences are.
    """
    later = [graph[n] for s in stages[index + 1 :] for n in s.nodes]
    trains = frozenset[str]().union(*(n.trains for n in later))
    return tuple(
        BoundaryTensor(
            n,
            graph[n].out or (),
            graph[n].packed,
            n in trains,
            () if as_indexed else graph[n].dims,
            graph[n].idle,
        )
        for n in stages[index].sends
    )
