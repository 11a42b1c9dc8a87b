from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from launcher.job.schema.steps import Step
from launcher.plan.plan import ask
from launcher.plan.step_order import Phase, check, phases
from tests.plan.made import job, refusal, words

ONE = TypeAdapter[Step](Step)


def step(kind: str, **more: Any) -> Step:
    return ONE.validate_python({"kind": kind, **more})


def steps(text: str) -> dict[str, Step]:
    """Parse ``train,evaluate:exported``: verbs in order, and after a colon what a step reads."""
    out: dict[str, Step] = {}
    for word in text.split(","):
        kind, _, of = word.partition(":")
        more = {"path": "there"} if kind == "load" else {"src": of} if kind in ("transform", "export") and of else {}
        more = {"src": "there"} if kind == "import" else more
        out[kind] = step(kind, **({"of": of} if kind == "evaluate" and of else more))
    return out


def test_steps_are_grouped_by_where_they_run() -> None:
    found = phases(steps("load,train,evaluate,sync_shared,save,merge_strategies,transform,export,sample"))
    assert found == (
        Phase("ranks", ("load", "train", "evaluate", "sync_shared", "save")),
        Phase("files", ("merge_strategies", "transform")),
        Phase("alone", ("export", "sample")),
    )


def test_an_export_that_is_not_checked_is_work_on_files() -> None:
    assert phases({"export": step("export", check=False)}) == (Phase("files", ("export",)),)


def test_evaluating_a_file_needs_no_ranks() -> None:
    assert [p.where for p in phases(steps("train,save,export,evaluate:exported"))] == ["ranks", "alone"]


WRONG = {
    "transform,train,save":
        "steps.transform: needs a checkpoint, but 'save', which makes it, comes after 'transform' "
        "(try: 'steps=[train,save,transform]')",
    "train,transform":
        "steps.transform: needs a checkpoint, but there is no 'save' step to make one, "
        "and steps.transform.src names none "
        "(try: 'steps=[train,save,transform]')",
    "train,merge_strategies":
        "steps.merge_strategies: needs a checkpoint, but there is no 'save' step to make one, "
        "and steps.merge_strategies.src names none "
        "(try: 'steps=[train,save,merge_strategies]')",
    "train,export":
        "steps.export: needs a checkpoint, but there is no 'save' step to make one, "
        "and steps.export.src names none "
        "(try: 'steps=[train,save,export]')",
    "train,sample":
        "steps.sample: needs an exported model, but there is no 'export' step to make one "
        "(try: 'steps=[train,save,export,sample]')",
    "train,save,sample,export":
        "steps.sample: needs an exported model, but 'export', which makes it, comes after 'sample' "
        "(try: 'steps=[train,save,export,sample]')",
    "train,load":
        "steps.load: would overwrite what 'train' has just trained (try: 'steps=[load,train]')",
    "train,save,export,evaluate":
        "steps.evaluate: needs the ranks, which have ended before 'export'; put it before 'export' "
        "(try: 'steps=[train,save,evaluate,export]')",
    "evaluate:exported,train":
        "steps.evaluate: needs an exported model, but there is no 'export' step to make one "
        "(try: 'steps=[train,save,export,evaluate]')",
    "train,save,evaluate:transformed":
        "steps.evaluate: needs a transformed checkpoint, but there is no 'transform' step to make one "
        "(try: 'steps=[train,save,transform,evaluate]')",
    "import,train,export":
        "steps.export: needs a checkpoint, but there is no 'save' step to make one, "
        "and steps.export.src names none "
        "(try: 'steps=[import,train,save,export]')",
    "inspect,import":
        "steps.inspect: needs a checkpoint, but 'import', which makes it, comes after 'inspect' "
        "(try: 'steps=[import,inspect]')",
    "verify":
        "steps.verify: needs a checkpoint, but there is no 'save' step to make one, "
        "and steps.verify.src names none "
        "(try: 'steps=[train,save,verify]')",
    "save,sample":
        "steps.sample: needs an exported model, but there is no 'export' step to make one "
        "(try: 'steps=[save,export,sample]')",
    "sample":
        "steps.sample: needs an exported model, but there is no 'export' step to make one "
        "(try: 'steps=[train,save,export,sample]')",
    "train,import,save":
        "steps.import: the ranks start from its result; put it first (try: 'steps=[import,train,save]')\n"
        "steps.save: needs the ranks, which have ended before 'import'; put it before 'import' "
        "(try: 'steps=[import,train,save]')",
    "sample,train,save,export,sync_shared":
        "steps.sample: needs an exported model, but 'export', which makes it, comes after 'sample' "
        "(try: 'steps=[train,save,sync_shared,export,sample]')\n"
        "steps.sync_shared: needs the ranks, which have ended before 'export'; put it before 'export' "
        "(try: 'steps=[train,save,sync_shared,export,sample]')",
}  # fmt: skip


@pytest.mark.parametrize("order", WRONG)
def test_an_order_that_cannot_work_is_refused_with_one_that_does(order: str) -> None:
    assert "\n".join(map(str, check(steps(order)))) == WRONG[order]


@pytest.mark.parametrize("order", [
    "train", "save", "train,evaluate,save", "load,train,save", "load,evaluate", "transform:elsewhere,train",
    "transform:elsewhere", "export:elsewhere,sample", "train,save,transform,evaluate:transformed,export,sample",
    "save,load", "import,train,save,verify,inspect", "import,evaluate,export,sample", "import,verify",
    "train,save,evaluate,sync_shared",
])  # fmt: skip
def test_an_order_that_works_is_left_alone(order: str) -> None:
    assert check(steps(order)) == []


VERBS = ["train", "sync_shared", "save", "load", "import", "merge_strategies", "transform", "export", "sample",
         "verify", "inspect"]  # fmt: skip
orders = st.lists(st.sampled_from([*VERBS, "transform:there"]), min_size=1, unique_by=lambda v: v.partition(":")[0])


@given(orders, st.sampled_from(["", "evaluate", "evaluate:exported", "evaluate:transformed"]), st.integers(0, 8))
def test_every_cure_is_an_order_that_works_with_all_that_was_asked_for(order: list[str], extra: str, at: int) -> None:
    asked = steps(",".join([*order[:at], *([extra] if extra else []), *order[at:]]))
    cures = {p.cure for p in check(asked)}
    assert len(cures) <= 1
    for cure in cures:
        names = re.findall(r"\w+", shlex.split(cure)[0].partition("=")[2])
        assert asked.keys() <= set(names)
        assert check({n: asked.get(n) or step(n) for n in names}) == []


@pytest.mark.parametrize(
    "override", ["steps=[transform,train,save]", "steps=[train,sample]", "steps=[train,save,export,evaluate]"]
)
def test_a_cure_can_be_pasted(override: str) -> None:
    ask(job(override, *words(refusal(override))))
