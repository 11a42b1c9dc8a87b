"""Files of strategies over device matrices: after saving and loading, the plan is the same to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy import meaning
from launcher.checkpoint.layout.strategy_file import text as strategy_text
from launcher.errors import RequestError
from launcher.extras.device_matrix.show import operators_json
from launcher.extras.mindspore.operator_strategies import node_text, of_sharding
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.show import plan_json
from launcher.plan.show import text as plan_text
from launcher.planner.plan_job import plan_job
from tests.extras.device_matrix.run.test_device_matrices import DOCUMENT, SHAPES, drawn, network
from tests.tiers import some

LOAD = "parallel.operator_strategy.load"


def with_parallel(job: Job, **changes: Any) -> Job:
    said = job.model_dump(by_alias=True)
    said["parallel"] |= changes
    return Job.model_validate(said)


def loading(job: Job, plan: Plan, path: Path, **changes: Any) -> Job:
    """Return the same request with strategies from a file that has only those of ``plan``."""
    assert plan.sharding is not None
    path.write_text(operators_json(plan.sharding))
    return with_parallel(job, mode="semi_auto", operators={}, operator_strategy={"load": str(path)}, **changes)


def shown(plan: Plan) -> tuple[str, Any]:
    """Return the plan's text without settings, and the full plan as data."""
    told = json.loads(plan_json.as_json(plan))
    told.pop("settings")
    lines = plan_text.text(plan).split("\n")
    ends = [i for i, line in enumerate(lines) if line.startswith("  settings")]
    return "\n".join(lines[: ends[0]] if ends else lines), told


@pytest.mark.parametrize(("net", "seed"), some([(net, seed) for net in SHAPES for seed in range(12)], 8))
def test_strategies_of_a_file_make_the_plan_that_wrote_it(tmp_path: Path, net: str, seed: int) -> None:
    job = drawn(net, seed)
    plan = plan_job(job)
    again = plan_job(loading(job, plan, tmp_path / "o.json"))
    assert shown(again) == shown(plan)
    assert again.sharding is not None
    assert plan.sharding is not None
    assert operators_json(again.sharding) == operators_json(plan.sharding)


@pytest.mark.parametrize(
    ("net", "stages"),
    some([(net, stages) for net in SHAPES for stages in ((1,) if net == "Convolutions" else (1, 2))], 4),
)
def test_a_search_that_was_saved_is_not_made_again(tmp_path: Path, net: str, stages: int) -> None:
    job = with_parallel(network(net, 8, stages), mode="recursive_programming")
    plan = plan_job(job)
    again = plan_job(loading(job, plan, tmp_path / "o.json"))
    assert shown(again) == shown(plan)
    assert plan.sharding is not None
    assert again.sharding is not None
    assert plan.sharding.reasons


def test_reasons_of_a_search_are_left_out_where_a_strategy_was_edited(tmp_path: Path) -> None:
    job = with_parallel(network("Document", 4), mode="recursive_programming")
    path = tmp_path / "o.json"
    load = loading(job, plan_job(job), path)
    rows = json.loads(path.read_text())
    rows["operators"]["relu1"] = {"in": [[1, 4]]}
    path.write_text(json.dumps(rows))
    again = plan_job(load).sharding
    assert again is not None
    assert not again.reasons


def test_a_strategy_in_the_request_overrides_the_file(tmp_path: Path) -> None:
    job = network("Document", 8, operators=DOCUMENT)
    load = loading(job, plan_job(job), tmp_path / "o.json")
    plan = plan_job(with_parallel(load, operators={"relu*": {"in": [[2, 1]]}}))
    assert "relu1: relu [2, 1] -> [2, 1], 4 ranks each repeat it" in plan_text.text(plan)
    assert "matmul2: matmul [1, 8] x [8, 1]" in plan_text.text(plan)


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("matmul9", {"in": [[2, 4]]}, "matmul9: no module with operators has this name; these have: "
         "flatten, matmul1, relu1, matmul2, relu2, matmul3"),
        ("relu1", {"in": [[3, 1]]}, "relu1: in[0]: [3, 1]: dim 0 of [16, 32] is not a multiple of 3"),
        ("relu1:gelu", {"in": [[2, 1]]},
         "relu1:gelu: its module has no such operator, only relu1:relu, did you mean 'relu1:relu'?"),
    ],
)  # fmt: skip
def test_a_problem_in_a_strategy_file_names_the_file(tmp_path: Path, name: str, row: dict[str, Any], text: str) -> None:
    job = network("Document", 8, operators=DOCUMENT)
    path = tmp_path / "o.json"
    load = loading(job, plan_job(job), path)
    rows = json.loads(path.read_text())
    rows["operators"][name] = row
    path.write_text(json.dumps(rows))
    with pytest.raises(RequestError) as error:
        plan_job(load)
    assert [(p.key, p.text) for p in error.value.problems] == [(LOAD, f"{path}: {text}")]


def layouts_of(plan: Plan, path: Path) -> str:
    """Write a file with the layouts of all parameters of ``plan``, and return its path."""
    strategy = strategy_of_plan(plan)
    path.write_text(strategy_text(strategy, tuple(range(strategy.stages))))
    return str(path)


@pytest.mark.parametrize(("net", "seed"), some([(net, seed) for net in SHAPES for seed in range(12)], 8))
def test_parameters_get_the_layouts_of_a_file_and_operators_follow(tmp_path: Path, net: str, seed: int) -> None:
    job = drawn(net, seed)
    plan = plan_job(job)
    path = layouts_of(plan, tmp_path / "p.json")
    again = plan_job(with_parallel(job, operators={}, param_strategy={"load": path, "only_trainable": False}))
    assert {p.name: meaning(p.layout) for p in again.params} == {p.name: meaning(p.layout) for p in plan.params}


def test_a_file_whose_layouts_fit_no_axis_needs_no_other_word_for_device_matrices(tmp_path: Path) -> None:
    path = layouts_of(plan_job(network("Document", 8, operators=DOCUMENT)), tmp_path / "p.json")
    text = plan_text.text(plan_job(network("Document", 8, param_strategy={"load": path})))
    assert "matmul1: matmul [2, 4] x [4, 1] -> [2, 1], 4 terms added up" in text
    assert "matmul2: matmul [1, 8] x [8, 1] -> [1, 1], 8 terms added up" in text


def test_a_file_says_how_many_ranks_there_are_where_the_request_does_not(tmp_path: Path) -> None:
    plan = plan_job(network("Document", 8, operators=DOCUMENT))
    path = layouts_of(plan, tmp_path / "p.json")
    bare = network("Document", 8, param_strategy={"load": path})
    again = plan_job(bare.model_copy(update={"launch": bare.launch.model_copy(update={"nproc": None})}))
    assert again.sizes.grid.size == 8
    assert {p.name: p.layout for p in again.params} == {p.name: p.layout for p in plan.params}


def test_a_strategy_that_the_file_contradicts_is_refused_with_both(tmp_path: Path) -> None:
    path = layouts_of(plan_job(network("Document", 8, operators=DOCUMENT)), tmp_path / "p.json")
    operators = {"matmul1": {"in": [[2, 1], [1, 4]]}}
    with pytest.raises(RequestError) as error:
        plan_job(network("Document", 8, operators=operators, param_strategy={"load": path}))
    (problem,) = error.value.problems
    assert problem.key == "parallel.operators.matmul1"
    here, there = "[whole, 4] (ranks [1] apart)", "[4, whole] (ranks [1] apart)"
    assert problem.text == f"matmul1.weight is cut {here} here, and {there} in {path} of parallel.param_strategy.load"
    assert problem.cure == "'~parallel.operators.matmul1'"


def test_mindspores_file_has_the_strategies_of_operators_too(tmp_path: Path) -> None:
    job = network("Document", 8, operators=DOCUMENT)
    plan = plan_job(job)
    assert plan.sharding is not None
    path = tmp_path / "o.ms.json"
    path.write_bytes(node_text(of_sharding(plan.sharding, lambda stage: stage)))
    again = plan_job(with_parallel(job, operators={}, operator_strategy={"load": str(path)}))
    assert shown(again) == shown(plan)


@pytest.mark.parametrize(("net", "seed"), some([(net, seed) for net in SHAPES for seed in range(12)], 10))
def test_layouts_of_a_file_go_with_the_strategies_that_made_them(tmp_path: Path, net: str, seed: int) -> None:
    job = drawn(net, seed)
    plan = plan_job(job)
    path = layouts_of(plan, tmp_path / "p.json")
    again = plan_job(with_parallel(job, param_strategy={"load": path, "only_trainable": False}))
    assert {p.name: meaning(p.layout) for p in again.params} == {p.name: meaning(p.layout) for p in plan.params}
