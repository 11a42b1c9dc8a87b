"""Operator strategies as a JSON file that can be edited by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launcher.plan.operators.resolve import Flow
from launcher.plan.operators.strategy import Axes, Reading

FORMAT, VERSION = "launcher.operators", 1


def as_json(flow: Flow, tp: int) -> str:
    """What became of ``parallel.operators``, globs and slices worked out: a module a line, in order."""
    rows = {}
    for o in (s.operator for s in flow.spreads):
        said = Reading(o.input, o.output, o.weights)
        parts = [*said.weights, ("input", said.input), ("output", said.output)]
        rows[o.module] = {name: _dims(axes) for name, axes in parts if axes is not None}
    head = {"format": FORMAT, "version": VERSION, "tp": tp}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items()]
    listed = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return "{\n" + "".join(lines) + '  "operators": {' + (f"\n{listed}\n  " if rows else "") + "}\n}\n"


def _dims(axes: Axes) -> list[Any]:
    """As a strategy by axis names is written."""
    out: list[Any] = []
    for dim in axes:
        if len(dim) > 1:
            out.append(list(dim))
        else:
            out.append(dim[0] if dim else None)
    return out


def parsed(data: Any) -> tuple[int, dict[str, Any]]:
    """The size of ``tp`` and the strategy of each module; ``ValueError`` when ``data`` is no such file.

    The strategies themselves are looked at where those of ``parallel.operators`` are.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f'not a file of operator strategies: "format" is not "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ValueError(f"version {str(data.get('version'))[:40]}; this launcher reads version {VERSION}")
    tp, operators = data.get("tp"), data.get("operators")
    if type(tp) is not int or tp < 1:
        raise ValueError(f'"tp" is {json.dumps(tp)}: should be a whole number of ranks')
    if not isinstance(operators, Mapping):
        raise ValueError('"operators" should be an object: {module: strategy}')
    return tp, dict(operators)
