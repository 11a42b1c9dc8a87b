"""Operator strategies as a JSON file that can be edited by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.job.schema.parallel import OperatorStrategy
from launcher.plan.operators.resolve import Flow, Operator
from launcher.plan.operators.strategy import Axes, FromFile, Reading

FORMAT, VERSION = "launcher.operators", 2
OVER_TP = 1
"""The version before operators could have their own device matrices."""

KEY = "key"
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


class SearchedFile(OperatorStrategy):
    """The setting of a request whose strategies come from a file that a search wrote, with its reasons."""

    reasons: tuple[str, ...] = ()


def digest(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def as_json(flow: Flow, tp: int) -> str:
    """Returns the resolved ``parallel.operators``, without globs and slices: a module a line, in order."""
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
    said = Reading(o.input, o.output, o.weights)
    parts = [*said.weights, ("input", said.input), ("output", said.output)]
    row: dict[str, Any] = {name: _dims(axes) for name, axes in parts if axes is not None}
    return row if o.key == o.module else {**row, KEY: o.key}


def _dims(axes: Axes) -> list[Any]:
    """Returns ``axes`` in the form of a strategy by axis names."""
    out: list[Any] = []
    for dim in axes:
        if len(dim) > 1:
            out.append(list(dim))
        else:
            out.append(dim[0] if dim else None)
    return out


def parsed(data: Any, setting: str, path: str) -> tuple[int | None, dict[str, FromFile]]:
    """Returns the size of ``tp``, if the file has one, and the strategy of each module.

    The strategies are not checked here, but together with those of ``parallel.operators``. ``setting`` names
    the file ``path``. Raises ``ValueError`` if ``data`` is not a file of operator strategies.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f'not a file of operator strategies: "format" is not "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version not in (OVER_TP, VERSION):
        told = f"this launcher reads versions {OVER_TP} and {VERSION}"
        raise ValueError(f"version {str(version)[:40]}; {told}")

    # the axis that the rows name
    tp, operators = data.get("tp"), data.get("operators")
    if (tp is not None or version == OVER_TP) and (type(tp) is not int or tp < 1):
        raise ValueError(f'"tp" is {json.dumps(tp)}: should be a whole number of ranks')
    if not isinstance(operators, Mapping) or not all(isinstance(row, Mapping) for row in operators.values()):
        raise ValueError('"operators" should be an object: {module: strategy}')
    return tp, {name: _from_file(row, setting, path) for name, row in operators.items()}


def searched(data: Any) -> Searched | None:
    """Returns what a search recorded in a file, or ``None``; its reasons only if the rows are unedited.

    Raises ``ValueError`` if the record has another form.
    """
    said = data.get(SEARCHED)
    if said is None:
        return None
    reasons = said.get("reasons") if isinstance(said, Mapping) else None
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise ValueError(f'"{SEARCHED}" should be an object: {{"rows": digest, "reasons": [text]}}')
    rows = digest(data["operators"])
    return Searched(rows, tuple(reasons) if said.get("rows") == rows else ())


def _from_file(row: Mapping[str, Any], setting: str, path: str) -> FromFile:
    values = {name: value for name, value in row.items() if name not in (KEY, ASSIGNED)}
    assigned = row.get(ASSIGNED) is True
    return FromFile(values, setting=setting, path=path, key=str(row.get(KEY, "")), assigned=assigned)
