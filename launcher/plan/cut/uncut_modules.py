"""The modules that stages do not cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.plan.values.model_graph import ModelStructure, Param
from launcher.plan.values.module_names import owner, prefixes, stage_of

Inside = Mapping[str, Sequence[Param]]
"""The parameters below each module."""


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


def _inside(skeleton: ModelStructure) -> Inside:
    params_inside: dict[str, list[Param]] = {}
    for p in skeleton.params:
        for module in prefixes(p.name)[:-1]:
            params_inside.setdefault(module, []).append(p)
    return params_inside


def _around_layers(
    skeleton: ModelStructure, children: Mapping[str, Sequence[str]], inside: Inside
) -> frozenset[str]:
    """Returns modules that are mostly layers: most of their bytes are in containers of equal modules.

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
    """Returns the names and shapes of the parameters below ``module``; equal layers have the same."""
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
