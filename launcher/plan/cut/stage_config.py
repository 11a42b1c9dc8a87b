"""The stage of every module."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.keys import did_you_mean
from launcher.plan.values.facts import Graph, ModelStructure, Node, Param
from launcher.plan.values.module_names import best_key, from_the_top, is_glob, matches, prefixes

KEY = "parallel.pipeline.stage_config"


def flatten(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns ``config`` with dotted keys, which mean the same as nested ones.

    The later of two equal keys wins and takes the later position.

    >>> flatten({"layers.0": 0, "layers": {0: 1, "1": 1}})
    {'layers.0': 1, 'layers.1': 1}
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        for name, stage in flatten(value, path).items() if isinstance(value, Mapping) else ((path, value),):
            out.pop(name, None)
            out[name] = stage
    return out


BACKBONE, LOSS = "_backbone", "_loss_fn"
"""The names of the network and of the loss in MindSpore's ``WithLossCell``."""


def unwrapped(keys: Mapping[str, Any], skeleton: ModelStructure, stages: int) -> dict[str, Any]:
    """Returns ``keys`` with the model's own names if they are those of a ``WithLossCell`` around it.

    The loss is on the last stage, so ``keys`` may place it there; that entry is dropped.
    """
    above = f"{BACKBONE}."
    if BACKBONE in skeleton.modules or not any(key.startswith(above) for key in keys):
        return dict(keys)
    kept = {key: stage for key, stage in keys.items() if (key, stage) != (LOSS, stages - 1)}
    out: dict[str, Any] = {}
    for key, stage in kept.items():
        out.pop(key.removeprefix(above), None)
        out[key.removeprefix(above)] = stage
    return out


def stage_of(keys: Mapping[str, int], name: str) -> int | None:
    """Returns the stage that ``keys`` give to ``name``, or ``None``."""
    key = best_key(keys, name)
    return None if key is None else keys[key]


def owner(param: str) -> str:
    """Returns the module that owns a parameter ("" for the root).

    >>> owner("layers.0.attn.wq.weight")
    'layers.0.attn.wq'
    """
    return param.rpartition(".")[0]


def complaints(
    keys: Mapping[str, Any], skeleton: ModelStructure, ranks: int, chunks: int = 1
) -> list[Problem]:
    """Returns all problems of a ``stage_config`` for this model on ``ranks`` x ``chunks`` stages."""
    stages, stage_range = ranks * chunks, _there(ranks, chunks)
    names = (*skeleton.modules, *(p.name for p in skeleton.params))
    numbers = _numbers(keys)

    # each key alone
    problems: list[Problem] = []
    for key, stage in numbers.items():
        missing = _no_such_stage(key, stage, stages, stage_range)
        problems += [missing] if missing else _no_such_module(key, stage, names)
    if len(numbers) < len(keys):
        guess = _without(numbers, skeleton, stages)
        problems += [
            _no_number(k, s, guess.get(k, 0), stage_range) for k, s in keys.items() if k not in numbers
        ]
    if problems:
        return problems

    # all keys together: no module without a stage, no stage without a module
    without = _without(keys, skeleton, stages)
    if without:
        return [_no_stage(without)]
    return _unused(set(range(stages)) - {stage_of(keys, n) for n in names}, stage_range)


def impossible(keys: Mapping[str, Any], ranks: int, chunks: int = 1) -> list[Problem]:
    """Returns the problems of ``keys`` for any model: stages that do not exist, or that no key names."""
    stages, stage_range, numbers = ranks * chunks, _there(ranks, chunks), _numbers(keys)
    problems = [p for p in (_no_such_stage(k, s, stages, stage_range) for k, s in numbers.items()) if p]
    if problems or len(numbers) < len(keys):
        return problems
    return _unused(set(range(stages)) - set(numbers.values()), stage_range)


def _numbers(keys: Mapping[str, Any]) -> dict[str, int]:
    return {k: s for k, s in keys.items() if isinstance(s, int) and not isinstance(s, bool)}


def _there(ranks: int, chunks: int) -> str:
    stages = ranks * chunks
    text = ("0" if stages == 1 else f"0..{stages - 1}") + f" (parallel.pipeline.stages={ranks}"
    return text + (f" x chunks={chunks})" if chunks > 1 else ")")


def _unused(stages: Collection[int], stage_range: str) -> list[Problem]:
    text = f"nothing is on stage {', '.join(map(str, sorted(stages)))}; there are stages {stage_range}"
    return [Problem(KEY, text, f"{KEY}=auto")] if stages else []


def _no_such_stage(key: str, stage: int, stages: int, stage_range: str) -> Problem | None:
    if 0 <= stage < stages:
        return None
    where, nearest = f"{KEY}.{key}", 0 if stage < 0 else stages - 1
    return Problem(where, f"{stage}: no such stage; there are stages {stage_range}", f"{where}={nearest}")


def _no_number(key: str, stage: Any, guess: int, stage_range: str) -> Problem:
    meant = int(stage) if isinstance(stage, str) and stage.isdecimal() else guess
    text = f"{stage!r} is not a stage number; there are stages {stage_range}"
    return Problem(f"{KEY}.{key}", text, f"{KEY}.{key}={meant}")


def _no_such_module(key: str, stage: int, names: tuple[str, ...]) -> list[Problem]:
    where = f"{KEY}.{key}"
    if not any(matches(key, n) for n in names):
        tops = tuple(dict.fromkeys(n.split(".")[0] for n in names))
        if close := from_the_top(key, names) or _near(key, names, tops):
            text = f"the model has no module {key!r}{did_you_mean(close)}"
            return [Problem(where, text, f"{KEY}.{close}={stage}")]
        known = ", ".join(tops[:12]) + (" ..." if len(tops) > 12 else "")
        return [Problem(where, f"the model has no module {key!r}; it has {known}")]
    return []


def _near(key: str, names: Sequence[str], tops: Sequence[str]) -> str | None:
    """Returns the name that is most similar to ``key``, or ``None``.

    Numbers must be equal. Of a glob only the first part may differ.
    """
    if not is_glob(key):
        same = [n for n in names if re.findall(r"\d+", n) == re.findall(r"\d+", key)]
        return next(iter(get_close_matches(key, same, 1, 0.5)), None)
    first, dot, rest = key.partition(".")
    fits = [t for t in tops if any(matches(t + dot + rest, n) for n in names)]
    return next((t + dot + rest for t in get_close_matches(first, fits, 1, 0.5)), None)


def _without(keys: Mapping[str, Any], skeleton: ModelStructure, stages: int) -> dict[str, int]:
    """Returns the largest modules (or single parameters) without a stage, each with a suggested stage.

    The modules before and after it suggest the stage.
    """
    has = {p.name: stage_of(keys, p.name) for p in skeleton.params if not p.buffer}
    order = list(has.values())
    out: dict[str, int] = {}
    for at, (name, stage) in enumerate(has.items()):
        if stage is None:
            above = prefixes(name)[:-1]
            bare = [m for m in above if all(has[n] is None for n in has if n.startswith(m + "."))]
            largest = bare[0] if bare else name
            out.setdefault(largest, _suggested(order[:at], order[at:], stages))
    return out


def _suggested(before: Sequence[int | None], after: Sequence[int | None], stages: int) -> int:
    """Returns a stage for what lies between modules: that of the module before, else that of the next one.

    If no later module has a stage, it is the last stage.
    """
    earlier = [s for s in before if s is not None]
    later = [s for s in after if s is not None]
    if not later:
        return stages - 1
    return earlier[-1] if earlier else later[0]


def _no_stage(without: Mapping[str, int]) -> Problem:
    """Returns one problem for all: one forgotten name in a large model may leave hundreds without a stage."""
    names = list(without)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    verb = "has" if len(names) == 1 else "have"
    cure = " ".join(f"{KEY}.{n}={s}" for n, s in without.items()) if len(names) <= 3 else f"{KEY}=auto"
    return Problem(KEY, f"{', '.join(map(repr, names[:6]))}{more} {verb} parameters but no stage", cure)


def units(skeleton: ModelStructure, at_least: int = 1, stacks: bool = True) -> tuple[str, ...]:
    """Returns the modules that automatic choices do not cut, in definition order.

    They are the children of the root. Containers are replaced by their contents and, with ``stacks``, modules
    that consist mostly of layers by their children. While fewer than ``at_least`` of them have parameters,
    the largest one is replaced by its children too.
    """
    children: dict[str, list[str]] = {}
    for name in skeleton.modules:
        children.setdefault(name.rpartition(".")[0], []).append(name)
    inside = _inside(skeleton)
    opened = _around_layers(skeleton, children, inside) if stacks else frozenset()

    def expand(name: str) -> list[str]:
        below = children.get(name, [])
        around = name in skeleton.containers or name in opened
        return [u for c in below for u in expand(c)] if around and below else [name]

    out = [u for top in children.get("", []) for u in expand(top)]
    while True:
        sizes = {u: _bytes(inside, u) for u in out}
        loaded = [u for u in out if sizes[u]]
        open_to = [u for u in loaded if children.get(u)]
        if len(loaded) >= at_least or not open_to:
            return tuple(out)
        big = max(open_to, key=lambda u: sizes[u])
        at = out.index(big)
        out[at : at + 1] = [u for c in children[big] for u in expand(c)]


Inside = Mapping[str, Sequence[Param]]
"""The parameters below each module."""


def _inside(skeleton: ModelStructure) -> Inside:
    params_inside: dict[str, list[Param]] = {}
    for p in skeleton.params:
        for module in prefixes(p.name)[:-1]:
            params_inside.setdefault(module, []).append(p)
    return params_inside


def _around_layers(
    skeleton: ModelStructure, children: Mapping[str, Sequence[str]], inside: Inside
) -> frozenset[str]:
    """Returns modules that are mostly layers: most of their bytes are in containers of alike modules.

    Only the outermost such containers count.
    """
    stacks: list[str] = []
    for name in skeleton.modules:
        if name in skeleton.containers and not any(name.startswith(s + ".") for s in stacks):
            shapes = [child_shapes for c in children.get(name, []) if (child_shapes := _shapes(inside, c))]
            if len(set(shapes)) < len(shapes):
                stacks.append(name)
    layers: dict[str, int] = {}
    for s in stacks:
        for around in prefixes(s)[:-1]:
            layers[around] = layers.get(around, 0) + _bytes(inside, s)
    return frozenset(m for m, size in layers.items() if 2 * size > _bytes(inside, m))


def _shapes(inside: Inside, module: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the names and shapes of the parameters below ``module``; alike layers have the same."""
    start = module + "."
    return tuple((p.name.removeprefix(start), p.spec.shape) for p in inside.get(module, ()))


def _bytes(inside: Inside, module: str) -> int:
    return sum(p.spec.nbytes for p in inside.get(module, ()))


def leaves(keys: Mapping[str, int], skeleton: ModelStructure) -> frozenset[str]:
    """Returns the modules that are entirely on one stage: they stay eager and are never traced into."""
    stages: dict[str, set[int | None]] = {}
    for name in skeleton.modules:
        stage = stage_of(keys, name)
        for prefix in prefixes(name):
            stages.setdefault(prefix, set()).add(stage)
    for param in skeleton.params:
        for prefix in prefixes(owner(param.name)) if owner(param.name) else []:
            stages[prefix].add(stage_of(keys, param.name))
    return frozenset(name for name, at in stages.items() if len(at) == 1)


def own(graph: Graph, node: Node) -> frozenset[int]:
    """Returns the memory of the module that ``node`` calls: its parameters and buffers."""
    input_memory = frozenset[int]().union(*(graph[m].lies for m in node.inputs))
    return node.reads - input_memory if node.kind == "module" else frozenset()


def problems(graph: Graph, at: Mapping[str, int]) -> list[Problem]:
    """Returns a problem for each node whose in-place change another stage would miss or see too early.

    A value that crosses a boundary is copied when its stage is done. That is right for uses on earlier stages
    before the change, and for uses on later stages after it. Changes that modules make to the model's own
    tensors are checked by name in ``plan.refusals.model_effects``.
    """
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    kept = frozenset[int]().union(
        *(own(graph, n) for n in graph.nodes), *(n.lies for n in graph.nodes if n.kind == "param")
    )
    problems = []
    for node in graph.nodes:
        for where in sorted(node.writes - (kept if node.kind == "module" else frozenset())):
            other = next(_blind(graph, at, order, writer=node, where=where, kept=where in kept), None)
            if other is not None:
                problems.append(_problem(at, node, other))
                break
    return problems


def _blind(
    graph: Graph, at: Mapping[str, int], order: Mapping[str, int], *, writer: Node, where: int, kept: bool
) -> Iterator[Node]:
    """Yields nodes that miss what ``writer`` does to the memory ``where``, or see it too early.

    ``kept``: the memory belongs to the model.
    """
    mine, now = at[writer.name], order[writer.name]

    # each value that crosses to its stage is a separate copy
    received = dict.fromkeys(
        m for n in graph.nodes if n.kind != "param" and at[n.name] == mine for m in n.inputs
        if graph[m].kind != "param" and at[m] < mine and where in graph[m].lies
    )  # fmt: skip
    if len(received) > 1:
        yield graph[list(received)[1]]

    # uses on other stages are right only in the order of the stages
    for n in graph.nodes:
        if n.kind == "param" or n is writer or at[n.name] == mine or where not in n.reads | n.lies:
            continue
        before = order[n.name] < now and at[n.name] < mine
        after = order[n.name] > now and at[n.name] > mine
        if kept or not (before or after):
            yield n


def _problem(at: Mapping[str, int], writer: Node, other: Node) -> Problem:
    text = (
        f"{_label(writer)} on stage {at[writer.name]} changes memory in place that {_label(other)} on stage"
    )
    text = f"{text} {at[other.name]} shares, and each stage has a copy of its own"
    return Problem(KEY, f"{text}; put both on one stage, or make a new tensor instead")


def _label(node: Node) -> str:
    return repr(node.target) if node.kind == "module" else f"{node.kind} {node.target or node.name!r}"


def components(graph: Graph, modules: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Groups ``modules`` so that data flows to later groups only.

    ``modules`` are in the order of their first calls. If each is called once, each is a separate group and
    the order stays the same.
    """
    needs = _needs(graph, modules)
    bit = {m: 1 << i for i, m in enumerate(modules)}
    out: list[tuple[str, ...]] = []
    done: set[str] = set()

    def add(module: str) -> None:
        group = tuple(m for m in modules if needs[module] & bit[m] and needs[m] & bit[module])
        done.update(group)
        for m in modules:
            if needs[module] & bit[m] and m not in done:
                add(m)
        out.append(group)

    for module in modules:
        if module not in done:
            add(module)
    return tuple(out)


def _needs(graph: Graph, modules: Sequence[str]) -> dict[str, int]:
    """Returns for each module those that cannot be on a later stage, as bits in their order.

    The module itself is among them.
    """
    needs = {m: 1 << i for i, m in enumerate(modules)}
    bound = _bound(graph, frozenset(modules))
    while True:
        before = dict(needs)
        reach: dict[str, int] = {}

        # modules that share a stage with a node need whatever the node needs
        for node in graph.nodes:
            mask = 0
            for m in node.inputs:
                mask |= reach[m]
            for b in bound[node.name]:
                mask |= needs[b]
            for b in bound[node.name]:
                needs[b] = mask
            reach[node.name] = mask

        # a module with several calls passes needs to earlier nodes: repeat until nothing changes
        if needs == before:
            return needs


def _bound(graph: Graph, modules: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Returns for each node the modules on whose stage it must be.

    A module binds its own calls, glue that uses tensors of the module that glue changes, and whatever takes a
    value from it that is not a tensor.
    """
    owners = _owners(graph, modules)
    carried: dict[str, tuple[str, ...]] = {}
    out: dict[str, tuple[str, ...]] = {}
    for n in graph.nodes:
        taken = [m for i in n.inputs for m in carried[i]]
        again = n.kind == "glue" and n.out is None  # computed again on each stage that uses it
        mine = [n.target] if n.kind == "module" and n.target in modules else []
        touched: list[str] = []
        if n.kind == "glue":
            touched = [m for where in sorted(n.reads | n.lies) for m in owners.get(where, ())]

        # a value that is not a tensor cannot cross a boundary, so it binds its users
        out[n.name] = tuple(dict.fromkeys([*mine, *touched, *([] if again else taken)]))
        if again:
            carried[n.name] = tuple(taken)
        else:
            carried[n.name] = tuple(mine) if n.out is None else ()
    return out


def _owners(graph: Graph, modules: frozenset[str]) -> Mapping[int, tuple[str, ...]]:
    """Returns the modules that own memory which glue changes in place."""
    changed = frozenset[int]().union(*(n.writes for n in graph.nodes if n.kind == "glue"))
    out: dict[int, tuple[str, ...]] = {}
    for n in graph.nodes if changed else ():
        if n.target in modules and n.kind == "module":
            for where in own(graph, n) & changed:
                out[where] = (*out.get(where, ()), n.target)
    return out


def why(graph: Graph, group: Sequence[str]) -> str:
    """Returns why no cut can separate a group."""
    seen: list[str] = []
    for n in graph.nodes:
        if n.kind == "module" and n.target in group:
            if n.target in seen and seen[-1] != n.target:
                return f"{n.target!r} is called again after {seen[-1]!r}"
            seen.append(n.target)
    return f"code between the modules needs {', '.join(map(repr, group))} where it runs"


def together(group: Sequence[str]) -> str:
    """
    >>> together(("a", "b")), together(("a", "b", "c", "d", "e"))
    ("'a', 'b'", "'a', 'b' and 3 more")
    """
    shown = group if len(group) < 4 else group[:2]
    more = f" and {len(group) - len(shown)} more" if len(shown) < len(group) else ""
    return f"{', '.join(map(repr, shown))}{more}"
