"""A run reads the operators that another run has written to a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.plan.plan import Plan
from launcher.plan.show.text import text
from launcher.plan.tensor_parallel import operator_strategy_file
from launcher.planner.plan_job import plan_job
from launcher.run.write_layout_files import write
from tests.parity import job

KEY = "parallel.operator_strategy.load"
MLP: dict[str, Any] = {
    "layers.*.mlp.[gu]*": {"in": [[1, 1, 1], [1, 2]]}, "layers.*.mlp.down": {"in": [[1, 1, 2], [2, 1]]},
    "norm": {"input": [["dp", "tp"], None, None]}, "head": {"weight": ["tp", None]},
}  # fmt: skip
TEXT = """\
{
  "format": "launcher.operators",
  "version": 2,
  "tp": 2,
  "operators": {
    "layers.0.mlp.gate": {"weight": ["tp", null], "input": [null, null, null], "key": "layers.*.mlp.[gu]*"},
    "layers.0.mlp.up": {"weight": ["tp", null], "input": [null, null, null], "key": "layers.*.mlp.[gu]*"},
    "layers.0.mlp.down": {"weight": [null, "tp"], "input": [null, null, "tp"], "key": "layers.*.mlp.down"},
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


def test_operators_read_from_a_file_give_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(TEXT)
    told, there = plan_job(small(operators=MLP, grid={"tp": 2})), loaded(path)
    assert (there.params, there.sizes.grid) == (told.params, told.sizes.grid)
    assert there.estimate.memory == told.estimate.memory
    assert operator_strategy_file.as_json(there.operators, 2) == TEXT


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(
        '{"format": "launcher.operators", "version": 1, "tp": 2, "operators": {"head": {"weight": ["tp", null]}}}'
    )
    assert [(s.operator.key, s.operator.mode) for s in loaded(path).operators.spreads] == [("head", "column")]


SAVED = ("o.json", "o.ms.json")
GROUPS = ("megatron", "sequence")


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("choice", ["mlp", *GROUPS])
def test_operators_saved_in_either_format_give_the_same_plan_text(choice: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    operators = MLP
    if choice in GROUPS:
        operators = compose(["recipe=lm_single", f"operators={choice}"]).job.parallel.operators
    told = planned(tmp_path, operators=operators, grid={"tp": 2}, operator_strategy={"save": str(path)})
    again = planned(tmp_path, operator_strategy={"load": str(path)}, grid={"tp": 2})
    assert "operator_strategy.load" in again
    assert without(again, "operator_strategy") == without(told, "operator_strategy")


def planned(folder: Path, **parallel: Any) -> str:
    """Write the files of the plan, and return its text."""
    j = job(model__layers=2, model__tied=False, launch__nproc=4, parallel=parallel)
    made = plan_job(j)
    write(j, made, folder)
    return text(made)


def without(text: str, key: str) -> str:
    """Return ``text`` without the row of a setting, which may have several lines."""
    out = re.sub(rf"^  (settings|        )  parallel\.{key}.*\n(             .*\n)*", "", text, flags=re.MULTILINE)
    assert out != text
    return out


def test_a_strategy_in_the_request_overrides_the_operator_file(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(TEXT)
    there = loaded(path, operators={"norm": {"input": [None, None, None]}})
    assert next(s.operator for s in there.operators.spreads if s.operator.module == "norm").input == ((), (), ())


def test_a_file_edited_by_hand_is_looked_at_as_a_request_is(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps(json.loads(TEXT) | {"operators": {"layers.0.mlp.dwon": {"weight": ["tp", None]}}}))
    near = "no module has this name; modules are layers.0.mlp.gate, layers.0.mlp.up, layers.0.mlp.down"
    assert refusal(path) == f"{KEY}: {path}: layers.0.mlp.dwon: {near}"


WRONG = {
    "[]": 'not a file of operator strategies: "format" is not "launcher.operators"',
    '{"format": "launcher.operators", "version": 3}': "version 3; this launcher reads versions 1 and 2",
    '{"format": "launcher.operators", "version": 1, "tp": 0}': '"tp" is 0: should be a whole number of ranks',
    '{"format": "launcher.operators", "version": 1, "operators": {}}':
        '"tp" is null: should be a whole number of ranks',
    '{"format": "launcher.operators", "version": 2, "operators": {"up": []}}':
        '"operators" should be an object: {module: strategy}',
    '{"format": "launcher.operators", "version": 1, "tp": 2, "operators": []}':
        '"operators" should be an object: {module: strategy}',
}  # fmt: skip


@pytest.mark.parametrize("content", WRONG)
def test_files_that_are_no_operator_file_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(content)
    assert refusal(path) == f"{KEY}: {path}: {WRONG[content]}"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    assert refusal(path) == f"{KEY}: {path}: cannot be read: No such file or directory"
