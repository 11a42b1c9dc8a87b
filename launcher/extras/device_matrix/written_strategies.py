"""Reads and writes the strategies of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.nearest_strategy import nearest_cure
from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.operator_names import MARK, main_operators
from launcher.extras.device_matrix.written_dims import UnfitError, text
from launcher.extras.device_matrix.written_operator import Written, WrittenOperator, strategy_of
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.plan.tensor_parallel.module_strategies import KEY
from launcher.plan.tensor_parallel.strategy_lookup import StrategyLookup
from launcher.plan.values.module_names import listed
from launcher.plan.values.resolved import NO_FILE, Origins, StrategyOrigin


def read(
    config: Mapping[str, Any],
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    *,
    names: Sequence[str],
    ranks: int,
    origins: Origins = NO_FILE,
) -> tuple[tuple[Written, ...], list[Problem]]:
    """Returns the strategies that ``config`` has for the operators of one stage, and problems.

    ``names``: the names of the operators. ``origins``: the files that have strategies of ``config``. Exact
    names beat globs, later keys beat earlier ones, and both beat the strategies of a file.
    """
    strategies: list[Written] = []
    wrong: list[Problem] = []
    for (name, at), key in _keys(config, graph, rules, names, origins).items():
        value, origin = config[key], origins.get(key)
        rule = None if at is None else rules[at]
        if at is None or rule is None:
            places = [n for i, n in enumerate(graph.nodes) if (n.module == name if at is None else i == at)]
            ops = listed(tuple(dict.fromkeys(f"aten.{n.op}" for n in places)))
            why = f"none of its operators can be cut: there is no rule for {ops}"
            cure = quote(f"~{KEY}.{key}") if key == name else ""
            wrong.append(_problem(key, name, origin, why, cure))
            continue
        op = WrittenOperator(graph, graph.nodes[at], rule, ranks, graph.shapes(graph.nodes[at]))
        try:
            strategies.append(strategy_of(value, op, at, key, origin))
        except UnfitError as error:
            wrong.append(_problem(key, name, origin, str(error), nearest_cure(key, value, op, origin)))
    return tuple(strategies), wrong


def _keys(
    config: Mapping[str, Any],
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    names: Sequence[str],
    origins: Origins,
) -> dict[tuple[str, int | None], str]:
    """Returns the key of ``config`` for each operator, by the name that matches and the operator's place."""
    modules = StrategyLookup.from_config({k: v for k, v in config.items() if MARK not in k}, origins)
    operators = StrategyLookup.from_config({k: v for k, v in config.items() if MARK in k}, origins)
    main = main_operators(graph, rules)
    out: dict[tuple[str, int | None], str] = {}
    for module, at in main.items():
        key = modules.key(module)
        if key is not None:
            out[module, at] = key

    # an operator's own name beats its module's, unless the former is in a file and the latter in the request
    for at, name in enumerate(names):
        key = operators.key(name)
        if key is None:
            continue
        module = graph.nodes[at].module
        other = out.get((module, at)) if main[module] == at else None
        if other is None or key not in origins or other in origins:
            out.pop((module, at), None)
            out[name, at] = key
    return out


def _problem(key: str, module: str, origin: StrategyOrigin | None, why: str, cure: str) -> Problem:
    """Returns a problem of one strategy; it also names the file, or the module that a glob matches."""
    why = why if key == module else f"{module}: {why}"
    if origin is not None:
        return Problem(origin.setting, f"{origin.path}: {key}: {why}")
    return Problem(f"{KEY}.{key}".rstrip("."), why, cure)


def unmatched(
    config: Mapping[str, Any],
    modules: Sequence[str],
    operators: Sequence[str] = (),
    origins: Origins = NO_FILE,
) -> list[Problem]:
    """Returns problems for keys that match none of the ``modules`` of operators, nor of the ``operators``."""
    known = tuple(m for m in dict.fromkeys(modules) if m)
    problems = []
    for key, value in config.items():
        names = operators if MARK in key else modules
        if key in names or any(fnmatchcase(n, key) for n in names if n):
            continue
        if not key:
            form = "one strategy for each module, such as {layer1: {in: [[2, 4], [4, 1]]}}"
            problems.append(Problem(KEY, f"{text(value)}: should be {form}"))
            continue
        own = tuple(n for n in operators if MARK in key and n.partition(MARK)[0] == key.partition(MARK)[0])
        meant = did_you_mean(nearest(key, own or known))
        why = f"no module with operators has this name; these have: {listed(known)}{meant}"
        if own:
            why = f"its module has no such operator, only {listed(own)}{meant}"
        problems.append(_problem(key, key, origins.get(key), why, quote(f"~{KEY}.{key}")))
    return problems


NAMES = "xyzuvw"
"""Default names of axes."""


def as_written(strategy: OpStrategy, rule: OpRule, out: TensorLayout | None = None) -> dict[str, Any]:
    """Returns the written form of ``strategy``, with named axes; ``read`` returns the same strategy again.

    >>> matmul = OpRule((("m", "k"), ("k", "n")), (("m", "n"),), (("m", 8), ("k", 8), ("n", 8)), sums=("k",))
    >>> row = as_written(OpStrategy((2, 4), (("m", (0,)), ("k", (1,)))), matmul)
    >>> row
    {'matrix': [2, 4], 'axes': ['x', 'y'], 'in': [['x', 'y'], ['y', None]]}
    """
    names = _axis_names(strategy.matrix)
    row: dict[str, Any] = {
        "matrix": list(strategy.matrix),
        "axes": names,
        "in": [_named_dims(strategy.cut(letters), names) for letters in rule.ins],
    }

    # dims of the outputs that no input has
    taken = {letter for letters in rule.ins for letter in letters}
    if any(axes and letter not in taken for letter, axes in strategy.axes):
        row["makes"] = [_named_dims(strategy.cut(letters), names) for letters in rule.outs]
    if out is None:
        return row
    if out.matrix == strategy.matrix:
        return {**row, "out": [_named_dims(out, names)]}
    names = _axis_names(out.matrix)
    return {**row, "out": {"matrix": list(out.matrix), "axes": names, "out": [_named_dims(out, names)]}}


def _axis_names(matrix: Sequence[int]) -> list[str]:
    return [NAMES[a] if a < len(NAMES) else f"a{a}" for a in range(len(matrix))]


def _named_dims(layout: TensorLayout, names: Sequence[str]) -> list[Any]:
    dims = [[names[a] for a in axes] for axes in layout.dims]
    return [dim if len(dim) > 1 else (dim[0] if dim else None) for dim in dims]
