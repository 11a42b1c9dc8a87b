"""Operators that one run has worked out are what another is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.plan.operators import operator_file
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.run.layout_files import write
from tests.parity import job

KEY = "parallel.operator_strategy.load"
MLP: dict[str, Any] = {
    "layers.*.mlp.[gu]*": {"in": [[1, 1, 1], [1, 2]]}, "layers.*.mlp.down": {"in": [[1, 1, 2], [2, 1]]},
    "norm": {"input": [["dp", "tp"], None, None]}, "head": {"weight": ["tp", None]},
}  # fmt: skip
TEXT = """\
{
  "format": "launcher.operators",
  "version": 1,
  "tp": 2,
  "operators": {
    "layers.0.mlp.gate": {"weight": ["tp", null], "input": [null, null, null]},
    "layers.0.mlp.up": {"weight": ["tp", null], "input": [null, null, null]},
    "layers.0.mlp.down": {"weight": [null, "tp"], "input": [null, null, "tp"]},
    "norm": {"weight": [null], "input": [["dp", "tp"], null, null]},
    "head": {"weight": ["tp", null]}
  }
}
"""


def small(**parallel: Any) -> Any:
    return job(model__layers=1, model__tied=False, parallel=parallel)


def loaded(path: Path, **parallel: Any) -> Plan:
    return plan_job(small(operator_strategy={"load": str(path)}, **parallel))


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        loaded(path)
    return str(caught.value)


def test_globs_and_slices_are_written_out_a_module_a_line(tmp_path: Path) -> None:
    j = small(operators=MLP, grid={"tp": 2}, operator_strategy={"save": str(tmp_path / "o.json")})
    write(j, plan_job(j), tmp_path)
    assert (tmp_path / "o.json").read_text() == TEXT


def test_what_is_read_back_is_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(TEXT)
    told, there = plan_job(small(operators=MLP, grid={"tp": 2})), loaded(path)
    assert (there.params, there.sizes.grid) == (told.params, told.sizes.grid)
    assert there.estimate.memory == told.estimate.memory
    assert operator_file.as_json(there.operators, 2) == TEXT


def test_what_the_request_says_of_a_module_wins(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(TEXT)
    there = loaded(path, operators={"norm": {"input": [None, None, None]}})
    assert next(s.operator for s in there.operators.spreads if s.operator.module == "norm").input == ((), (), ())


def test_a_file_edited_by_hand_is_looked_at_as_a_request_is(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps(json.loads(TEXT) | {"operators": {"layers.0.mlp.dwon": {"weight": ["tp", None]}}}))
    near = "no module is called so; there are embed, layers, norm, head"
    text = f"parallel.operators.layers.0.mlp.dwon: {near} (try: '~parallel.operators.layers.0.mlp.dwon')"
    assert refusal(path) == text


WRONG = {
    "[]": 'not a file of operator strategies: "format" is not "launcher.operators"',
    '{"format": "launcher.operators", "version": 2}': "version 2; this launcher reads version 1",
    '{"format": "launcher.operators", "version": 1, "tp": 0}': '"tp" is 0: should be a whole number of ranks',
    '{"format": "launcher.operators", "version": 1, "tp": 2, "operators": []}':
        '"operators" should be an object: {module: strategy}',
}  # fmt: skip


@pytest.mark.parametrize("content", WRONG)
def test_what_is_no_such_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(content)
    assert refusal(path) == f"{KEY}: {path}: {WRONG[content]}"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    assert refusal(path) == f"{KEY}: {path}: cannot be read: No such file or directory"
