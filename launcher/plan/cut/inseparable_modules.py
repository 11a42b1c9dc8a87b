"""Groups of modules that no cut into stages can separate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.plan.cut.inplace_changes import own
from launcher.plan.values.model_graph import Graph


def components(graph: Graph, modules: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Groups ``modules`` so that data flows to later groups only.

    ``modules`` are in the order of their first calls. If each is called once, and none must share a stage
    with another, each is a separate group and the order stays the same.
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
    """Maps each module to the modules that must be on its stage or an earlier one, itself included.

    The modules are bits, in their order.
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
    """Returns for each node the modules with which it must share a stage.

    A module binds its own calls, and every node to which it passes a value that is not a tensor. If glue
    changes tensors of the module in place, the module also binds all glue that uses these tensors.
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
    return f"code between the modules needs {', '.join(map(repr, group))} on the stage where it runs"


def together(group: Sequence[str]) -> str:
    """Returns the names of a group, or two of them and the number of the others.

    >>> together(("a", "b")), together(("a", "b", "c", "d", "e"))
    ("'a', 'b'", "'a', 'b' and 3 more")
    """
    shown = group if len(group) < 4 else group[:2]
    more = f" and {len(group) - len(shown)} more" if len(shown) < len(group) else ""
    return f"{', '.join(map(repr, shown))}{more}"
