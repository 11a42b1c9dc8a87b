"""Strategies as they are written: slices a dim, or names of the axes of a device matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.similar_names import did_you_mean, nearest
from launcher.plan.operators.strategy import FromFile
from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.strategies.tensor_dims import UnfitError, text
from launcher.plan.sharding.strategies.written_operator import (
    KEY,
    Operator,
    Written,
    nearest_cure,
    strategy_of,
)
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.values.text import listed


def read(
    config: Mapping[str, Any], graph: OpGraph, rules: Sequence[OpRule | None], ranks: int
) -> tuple[tuple[Written, ...], list[Problem]]:
    """What ``config`` says of the operators of one stage. Exact names beat globs, later keys earlier."""
    found: list[Written] = []
    wrong: list[Problem] = []
    for module in dict.fromkeys(n.module for n in graph.nodes):
        key = key_of(config, module)
        if key is None:
            continue
        value = config[key]
        at = _operator(graph, rules, module)
        if at is None:
            ops = listed(tuple(dict.fromkeys(f"aten.{n.op}" for n in graph.nodes if n.module == module)))
            why = f"none of its operators can be cut: there is no rule for {ops}"
            cure = quote(f"~{KEY}.{key}") if key == module else ""
            wrong.append(_problem(key, module, value, why, cure))
            continue
        rule = rules[at]
        assert rule is not None
        op = Operator(graph, graph.nodes[at], rule, ranks, graph.shapes(graph.nodes[at]))
        try:
            found.append(strategy_of(value, op, at, key))
        except UnfitError as error:
            wrong.append(_problem(key, module, value, str(error), nearest_cure(key, value, op)))
    return tuple(found), wrong


def _problem(key: str, module: str, value: Any, why: str, cure: str) -> Problem:
    """Of one strategy: that of a file is found by the file, that of a glob by the module, too."""
    why = why if key == module else f"{module}: {why}"
    if isinstance(value, FromFile):
        return Problem(value.setting, f"{value.path}: {key}: {why}")
    return Problem(f"{KEY}.{key}".rstrip("."), why, cure)


def unmatched(config: Mapping[str, Any], modules: Sequence[str]) -> list[Problem]:
    """Names and globs that no operator's module goes by."""
    there = tuple(m for m in dict.fromkeys(modules) if m)
    found = []
    for key, value in config.items():
        if key in modules or any(fnmatchcase(m, key) for m in there):
            continue
        if not key:
            form = "a strategy a module, such as {layer1: {in: [[2, 4], [4, 1]]}}"
            found.append(Problem(KEY, f"{text(value)}: should be {form}"))
            continue
        meant = did_you_mean(nearest(key, there))
        why = f"no operator is of such a module; there are those of {listed(there)}{meant}"
        found.append(_problem(key, key, value, why, quote(f"~{KEY}.{key}")))
    return found


NAMES = "xyzuvw"
"""What axes are called that nobody has named."""


def as_written(strategy: OpStrategy, rule: OpRule, out: TensorLayout | None = None) -> dict[str, Any]:
    """The other way: every tensor that it takes, by names of axes; ``read`` gives the same again.

    >>> matmul = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 8), ("k", 8), ("n", 8)), sums=("k",))
    >>> row = as_written(OpStrategy((2, 4), (("m", (0,)), ("k", (1,)))), matmul)
    >>> row
    {'matrix': [2, 4], 'axes': ['x', 'y'], 'in': [['x', 'y'], ['y', None]]}
    """
    names = [NAMES[a] if a < len(NAMES) else f"a{a}" for a in range(len(strategy.matrix))]

    def tensor(layout: TensorLayout) -> list[Any]:
        dims = [[names[a] for a in axes] for axes in layout.dims]
        return [dim if len(dim) > 1 else (dim[0] if dim else None) for dim in dims]

    ins = [tensor(strategy.cut(letters)) for letters in rule.ins]
    said = {"matrix": list(strategy.matrix), "axes": names, "in": ins}
    return said if out is None else {**said, "out": [tensor(out)]}


def key_of(config: Mapping[str, Any], module: str) -> str | None:
    """The name or glob that says how ``module`` is cut."""
    if module in config:
        return module
    return next((k for k in reversed(list(config)) if fnmatchcase(module, k)), None)


def _operator(graph: OpGraph, rules: Sequence[OpRule | None], module: str) -> int | None:
    """Of a module's operators on parameters of its own the one that takes most, else the first of all."""
    mine = [at for at, n in enumerate(graph.nodes) if n.module == module and rules[at] is not None]
    params = {value for _, value in graph.params}
    own = [at for at in mine if params.intersection(graph.nodes[at].ins)]
    if own:
        return max(own, key=lambda at: (sum(map(prod, graph.shapes(graph.nodes[at]))), -at))
    return next(iter(mine), None)
