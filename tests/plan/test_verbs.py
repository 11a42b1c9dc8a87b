from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from launcher.job.schema.steps import Step
from launcher.plan.verbs import (
    CHECKPOINT,
    EXPORTED,
    TRANSFORMED,
    VERBS,
    loads,
    needs,
    output,
    saves_on_ranks,
    starts,
    where,
)

ONE = TypeAdapter[Step](Step)


def step(kind: str, **more: Any) -> Step:
    return ONE.validate_python({"kind": kind, **more})


def test_the_schema_lists_the_settings_of_every_verb() -> None:
    union = [get_args(member)[0] for member in get_args(get_args(Step)[0])]
    listed = {member.model_fields["kind"].default: member for member in union}
    assert listed == {kind: row.settings for kind, row in VERBS.items()}


@pytest.mark.parametrize(
    ("asked", "place", "lacks"),
    [
        (step("train"), "ranks", ""),
        (step("load"), "ranks", CHECKPOINT),
        (step("load", path="there"), "ranks", ""),
        (step("evaluate"), "ranks", ""),
        (step("evaluate", of="transformed"), "alone", TRANSFORMED),
        (step("evaluate", of="exported"), "alone", EXPORTED),
        (step("export"), "alone", CHECKPOINT),
        (step("export", check=False, src="there"), "files", ""),
        (step("import", src="there"), "files", ""),
        (step("sample"), "alone", EXPORTED),
    ],
    ids=str,
)
def test_where_a_step_runs_and_what_it_needs_may_hang_on_its_settings(asked: Step, place: str, lacks: str) -> None:
    assert (where(asked), needs(asked)) == (place, lacks)


def test_the_output_of_a_step_is_named_by_one_of_its_settings() -> None:
    named = [step("transform", dst="a"), step("export", path="b"), step("merge_strategies", dst="c")]
    named.append(step("prepare", src="here", dst="d", tokenizer="bytes"))
    assert [output(s) for s in named] == ["a", "b", "c", "d"]
    assert [output(step(kind)) for kind in ("transform", "export", "train", "save")] == [None] * 4


def test_weights_come_before_the_ranks_or_to_them() -> None:
    named = {"import": {"src": "there"}, "prepare": {"src": "here", "dst": "there", "tokenizer": "bytes"}}
    every = {kind: step(kind, **named.get(kind, {})) for kind in VERBS}
    assert [kind for kind, s in every.items() if starts(s)] == ["import"]
    assert [kind for kind, s in every.items() if loads(s)] == ["load"]
    assert [kind for kind, s in every.items() if saves_on_ranks(s)] == ["train", "save"]
