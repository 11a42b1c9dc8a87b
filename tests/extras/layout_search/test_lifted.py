"""A key of ``parallel`` that is auto or a list of candidates becomes a key of ``search.over``."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.job.schema.search import AXES, lifted


def over(**parallel: Any) -> dict[str, Any]:
    found: dict[str, Any] = lifted({"parallel": parallel}).get("search", {}).get("over", {})
    return found


@pytest.mark.parametrize(
    ("parallel", "found"),
    [
        ({}, {}),
        ({"pipeline": {"stages": 2, "stage_config": "auto"}}, {}),
        ({"pipeline": {"stages": "auto"}}, {"parallel.pipeline.stages": "auto"}),
        ({"pipeline": {"stages": [2, 4]}}, {"parallel.pipeline.stages": (2, 4)}),
        ({"hsdp": {"optimizer_level": "auto"}}, {"parallel.hsdp.optimizer_level": "auto"}),
        ({"hsdp": [None, {"shard_size": 2}]}, {"parallel.hsdp": (None, {"shard_size": 2})}),
        ({"grid": {"pp": [1, 2], "tp": 2}}, {"parallel.pipeline.stages": (1, 2)}),
        (
            {"grid": "auto"},
            {
                "parallel.grid.tp": "auto",
                "parallel.pipeline.stages": "auto",
                "parallel.hsdp.shard_size": "auto",
            },
        ),
    ],
)
def test_open_settings_are_recognized_in_every_form(parallel: dict[str, Any], found: dict[str, Any]) -> None:
    assert over(**parallel) == found


def test_a_plan_settles_a_scheduler_and_what_runs_again_where_nothing_else_is_open() -> None:
    own = {"pipeline": {"scheduler": "auto"}, "recompute": "auto"}
    assert over(**own) == {}
    assert over(**own, grid={"tp": "auto"}) == {
        "parallel.grid.tp": "auto",
        "parallel.pipeline.scheduler": "auto",
        "parallel.recompute": "auto",
    }


def test_lifting_does_not_change_its_input_and_is_idempotent() -> None:
    data = {"parallel": {"pipeline": {"stages": "auto", "chunks": 4}}}
    once = lifted(data)
    assert data == {"parallel": {"pipeline": {"stages": "auto", "chunks": 4}}}
    assert once["parallel"] == {"pipeline": {"chunks": 4}, "grid": {}} or once["parallel"] == {
        "pipeline": {"chunks": 4}
    }
    assert lifted(once) == once


def test_a_typed_value_closes_a_setting_that_parallel_auto_opens() -> None:
    asked = compose(["recipe=lm_tied_pp2_hsdp2", "parallel=auto", "parallel.pipeline.stages=2"]).job
    assert set(asked.search.over) == set(AXES) - {
        "parallel.pipeline.stages",
        "parallel.hsdp.shard_size",
        "parallel.hsdp.optimizer_level",
    }
    assert asked.parallel.pipeline.stages == 2
    assert asked.parallel.pipeline.stage_config == "auto"
    assert sorted(asked.search.over["parallel.operators"]) == ["megatron", "none", "sequence"]


def test_parallel_auto_in_a_file_opens_every_setting() -> None:
    data = compose(["recipe=lm_single"]).data | {"parallel": "auto"}
    assert set(Job.model_validate(data).search.over) == set(AXES)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "parallel.pipeline.stages=[2,x]",
            "parallel.pipeline.stages: [2,x]: x is not a valid value of this key (try: 'parallel.pipeline.stages=[2]')",
        ),
        (
            "parallel.hsdp=[null,{optimizer_level: level9}]",
            "parallel.hsdp: [null,{optimizer_level:level9}]: {optimizer_level:level9} is not a valid value of "
            "this key (try: 'parallel.hsdp=[null]')",
        ),
        (
            "parallel.pipeline.stages=[]",
            "parallel.pipeline.stages: []: the list of candidates is empty (try: parallel.pipeline.stages=auto)",
        ),
        (
            "parallel.operators=[megatron,foo]",
            "parallel.operators: foo: neither an option of operators (megatron, none, sequence) nor strategies "
            "by module",
        ),
        (
            "+search.over={train.steps: [1, 2]}",
            f"search.over.train.steps: this key cannot be searched; these can: {', '.join(AXES)}",
        ),
    ],
)
def test_invalid_candidates_are_refused(override: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        compose(["recipe=lm_single", override])
    assert str(caught.value) == text
