"""Files of operator strategies: how they are written and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.plan.tensor_parallel.module_strategies import Operator
from launcher.plan.tensor_parallel.sharded_operators import TensorParallelPlan
from launcher.plan.tensor_parallel.strategy_reader import Axes, Reading
from launcher.plan.values.resolved import Origins, StrategyOrigin

FORMAT, VERSION = "launcher.operators", 2
OVER_TP = 1
"""The version before operators could have their own device matrices."""

NAME_KEY = "key"
"""The field of a row with the name or glob under which its strategy was written."""

ASSIGNED = "assigned"
"""The field of a row that marks a strategy as assigned by a mode: no user wrote it."""

SEARCHED = "searched"

Rows = Mapping[str, Mapping[str, Any]]
"""The strategy of each module, in the form of ``parallel.operators``."""


@dataclass(frozen=True)
class Searched:
    """What a search records about the strategies that it chose.

    ``rows`` is their digest, which differs after an edit; ``reasons`` are the search's explanations.
    """

    rows: str
    reasons: tuple[str, ...]


def digest(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def as_json(flow: TensorParallelPlan, tp: int) -> str:
    """Returns the resolved ``parallel.operators``, without globs and slices, one module per line."""
    return text({s.operator.module: _row(s.operator) for s in flow.spreads}, tp)


def text(rows: Rows, tp: int | None, searched: Searched | None = None) -> str:
    """Returns the text of a file; ``tp``: the size of that axis, if rows name it."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION} | ({} if tp is None else {"tp": tp})
    if searched is not None:
        head[SEARCHED] = {"rows": searched.rows, "reasons": searched.reasons}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items()]
    listed = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return "{\n" + "".join(lines) + '  "operators": {' + (f"\n{listed}\n  " if rows else "") + "}\n}\n"


def _row(o: Operator) -> dict[str, Any]:
    reading = Reading(o.input, o.output, o.weights)
    parts = [*reading.weights, ("input", reading.input), ("output", reading.output)]
    row: dict[str, Any] = {name: _dims(axes) for name, axes in parts if axes is not None}
    return row if o.key == o.module else {**row, NAME_KEY: o.key}


def _dims(axes: Axes) -> list[Any]:
    """Returns ``axes`` as a strategy writes them: per dim a name, a list of names, or ``None``."""
    out: list[Any] = []
    for dim in axes:
        if len(dim) > 1:
            out.append(list(dim))
        else:
            out.append(dim[0] if dim else None)
    return out


def parsed(data: Any, setting: str, path: str) -> tuple[int | None, dict[str, Any], Origins]:
    """Returns the size of ``tp``, if the file has one, and the strategy of each module with its origin.

    The strategies are not checked here, but together with those of ``parallel.operators``. ``setting`` names
    the file ``path``. Raises ``ValueError`` if ``data`` is not a file of operator strategies.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f'not a file of operator strategies: "format" is not "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version not in (OVER_TP, VERSION):
        supported = f"this launcher reads versions {OVER_TP} and {VERSION}"
        raise ValueError(f"version {str(version)[:40]}; {supported}")

    # the axis that the rows name
    tp, operators = data.get("tp"), data.get("operators")
    if (tp is not None or version == OVER_TP) and (type(tp) is not int or tp < 1):
        raise ValueError(f'"tp" is {json.dumps(tp)}: should be a whole number of ranks')
    if not isinstance(operators, Mapping) or not all(isinstance(row, Mapping) for row in operators.values()):
        raise ValueError('"operators" should be an object: {module: strategy}')
    origins = {name: _origin(row, setting, path) for name, row in operators.items()}
    return tp, {name: _strategy(row) for name, row in operators.items()}, origins


def searched(data: Any) -> Searched | None:
    """Returns what a search recorded in a file, or ``None``; its reasons only if the rows are unedited.

    Raises ``ValueError`` if the record has another form.
    """
    record = data.get(SEARCHED)
    if record is None:
        return None
    reasons = record.get("reasons") if isinstance(record, Mapping) else None
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise ValueError(f'"{SEARCHED}" should be an object: {{"rows": digest, "reasons": [text]}}')
    rows = digest(data["operators"])
    return Searched(rows, tuple(reasons) if record.get("rows") == rows else ())


def _strategy(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in (NAME_KEY, ASSIGNED)}


def _origin(row: Mapping[str, Any], setting: str, path: str) -> StrategyOrigin:
    key, assigned = str(row.get(NAME_KEY, "")), row.get(ASSIGNED) is True
    return StrategyOrigin(setting, path, key=key, assigned=assigned)
