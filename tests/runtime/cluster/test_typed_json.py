"""Messages between ranks are values of declared types, which arrive unchanged; anything else is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.run.external_ranks.joining import ListensAt, UnreachablePeers
from launcher.run.external_ranks.leader import Instruction, Word
from launcher.run.external_ranks.shared_folder import SeesFile
from launcher.run.external_ranks.trial_layouts import Ended, ExternalTrial
from launcher.runtime.cluster.messages import Unsuitable, decode, encode
from launcher.runtime.cluster.network import ListenAddress
from launcher.runtime.faults import Fault
from launcher.steps.on_ranks import RankSteps

LISTENER = ListenAddress(0, "a", "eth0", "10.0.0.1", 7)


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that both are equal and that all nested types are the same."""
    assert type(a) is type(b), (where, type(a), type(b))
    if dataclasses.is_dataclass(a):
        for f in dataclasses.fields(a):
            same(getattr(a, f.name), getattr(b, f.name), f"{where}.{f.name}")
    elif isinstance(a, Mapping):
        assert [*a] == [*b]
        for key in a:
            same(a[key], b[key], f"{where}[{key}]")
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}[{i}]")
    elif hasattr(type(a), "model_fields"):
        for name in type(a).model_fields:
            same(getattr(a, name), getattr(b, name), f"{where}.{name}")
        assert a == b
        assert (a.model_extra, a.model_fields_set) == (b.model_extra, b.model_fields_set)
    else:
        assert a == b, where


def order(words: list[str]) -> Instruction:
    job = compose(words).job
    plan = plan_job(job)
    todo = RankSteps(job, plan, Path("runs/a"), ("train",), None, Path("b"), {})
    return Instruction(todo, Path("runs/a"), "cpu", None, 60.0, 1, True)


@pytest.mark.parametrize("recipe", ["lm_tied_pp2_hsdp2", "lm_recursive", "mlp_propagated", "lora_lm_pp2", "lm_drill"])
def test_an_order_comes_back_as_it_was(recipe):
    sent = order([f"recipe={recipe}"])
    same(sent, decode(encode(sent, Word), Word))


@pytest.mark.parametrize(
    "word",
    [
        0, 75, SeesFile(Path("runs/.shared-1")), ListensAt(None), UnreachablePeers((LISTENER,), {0: "a", 3: "b"}),
        Ended(Fault(1, 0, "ValueError", "it\nfailed", "trace", 7, True), None, 15, True), Ended(),
    ],
    ids=["an exit code", "another", "a file", "where", "whom", "a rank's end", "a good end"],
)  # fmt: skip
def test_a_word_comes_back_as_it_was(word):
    kind = Ended if isinstance(word, Ended) else Word
    same(word, decode(encode(word, kind), kind))


def test_an_own_class_keeps_its_arguments():
    own = [
        "model={_target_: my.Net, dim: 3, deep: {a: [1, 2.5, null, true]}}",
        "security.allow=[my]",
        "data=random_tokens",
    ]
    job = compose(own).job
    same(job, decode(encode(job, Job), Job))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("pwned"),)


@pytest.mark.parametrize(
    "body",
    [
        pickle.dumps(Evil()), b"", b"{}", b"[]", b"[9, 1]", b"[-1, 1]", b"[true, 1]", b'["5", 1]', b"[5, true]",
        b"[5, 1.0]",
        b'[5, "1"]', b"[0, [5]]", b"[0, []]", b'[0, ["a", "b"]]', b"[4, [[]]]", b"[" * 100_000, b"\xff", b"[5, 1] x",
    ],
)  # fmt: skip
def test_anything_else_is_refused_and_nothing_is_run(body, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unsuitable):
        decode(body, Word)
    assert not [*tmp_path.iterdir()]


def test_each_value_is_of_its_declared_type_or_refused():
    data = json.loads(encode(order([]), Word))
    places = [([], data)]
    tried = 0
    while places:
        path, node = places.pop()
        if isinstance(node, list):
            places += [([*path, i], one) for i, one in enumerate(node)]
        if not path or tried > 400:
            continue
        tried += 1
        copy = json.loads(json.dumps(data))
        above = copy
        for i in path[:-1]:
            above = above[i]
        above[path[-1]] = {"_target_": "os.system"}
        try:
            decode(json.dumps(copy).encode(), Word)
        except Unsuitable:
            continue
        pytest.fail(f"taken at {path}")
    assert tried > 300


def test_a_step_that_only_python_has_is_not_sent():
    from tests.steps.count_verb import Count

    sent = order([])
    steps = {"count": Count.model_construct(kind="count")}
    odd = dataclasses.replace(sent.todo, job=sent.todo.job.model_copy(update={"steps": steps}))
    with pytest.raises(Unsuitable, match="Count is not one of"):
        encode(dataclasses.replace(sent, todo=odd), Word)


def test_a_plan_and_a_trial_come_back():
    sent = order([])
    same(sent.todo.plan, decode(encode(sent.todo.plan, Plan), Plan))
    trial = ExternalTrial(sent.todo, "cpu", "gloo", 60.0, 1)
    same(trial, decode(encode(trial, Word), Word))
