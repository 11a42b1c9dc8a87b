"""``operators=auto``, before and after transformers is asked."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.models import hugging_face
from launcher.planner import hugging_face_operators

STYLES = {
    "model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce", "lm_head": "colwise_gather_output",
}  # fmt: skip
COLUMNS, ROWS = {"weight": ["tp", None]}, {"weight": [None, "tp"]}
WHOLE = {"weight": ["tp", None], "output": ["dp", None, None]}


def job(*words: str) -> Job:
    typed = ["recipe=lm_single", "data=random_tokens", "data.vocab_size=64", "steps=[train]", "operators=auto", *words]
    return compose(typed).job


HF = ("model=hf", "model.path=x")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("parallel.grid.tp=2",),
            "auto: only models of transformers have a tensor-parallel plan; the model is lm (try: operators=megatron)",
        ),
        (
            ("parallel.grid.tp=2", "model=null", "model._target_=torch.nn.Linear", "security.allow=[torch]"),
            "auto: only models of transformers have a tensor-parallel plan; the model is torch.nn.Linear",
        ),
        (HF, "auto: the size of tp is missing (try: parallel.grid.tp=2)"),
    ],
)
def test_a_request_that_cannot_have_it_is_refused(words: tuple[str, ...], text: str) -> None:
    assert [str(p) for p in hugging_face_operators.problems(job(*words))] == [f"parallel.operators: {text}"]


def test_nothing_is_refused_of_one_that_does_not_ask() -> None:
    assert list(hugging_face_operators.problems(job("operators=megatron"))) == []


def test_before_transformers_is_asked_something_is_cut() -> None:
    asked = job(*HF, "parallel.grid.tp=2")
    assert hugging_face_operators.with_placeholder_operators(asked).parallel.operators == {"auto": COLUMNS}


def use_tp_plan(monkeypatch: pytest.MonkeyPatch, styles: dict[str, str], heads: tuple[int, ...]) -> None:
    monkeypatch.setattr(hugging_face, "tp_plan", lambda _: styles)
    monkeypatch.setattr(hugging_face, "heads", lambda _: heads)


@pytest.mark.parametrize(("heads", "queries"), [((4, 2), COLUMNS), ((9, 3), WHOLE), ((4, 1), WHOLE)])
def test_styles_become_strategies_and_heads_that_have_no_halves_are_gathered(
    heads: tuple[int, ...], queries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tp_plan(monkeypatch, STYLES, heads)
    found = hugging_face_operators.written(job(*HF, "parallel.grid.tp=2")).parallel.operators
    assert found == {
        "model.layers.*.self_attn.q_proj": queries, "model.layers.*.self_attn.o_proj": ROWS, "lm_head": COLUMNS,
    }  # fmt: skip


def test_weights_of_experts_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = "model.layers.*.mlp.experts"
    use_tp_plan(monkeypatch, {**STYLES, mlp: "moe_tp_experts", f"{mlp}.down_proj": "rowwise"}, (4,))
    found = hugging_face_operators.written(job(*HF, "parallel.grid.tp=2")).parallel.operators
    assert not any("experts" in glob for glob in found)


def test_a_strategy_of_the_request_overrides_operators_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tp_plan(monkeypatch, STYLES, (4,))
    asked = job(*HF, "parallel.grid.tp=2", "parallel.operators.lm_head={weight: [null, tp]}")
    assert hugging_face_operators.written(asked).parallel.operators["lm_head"] == ROWS


def test_an_architecture_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tp_plan(monkeypatch, {}, (4,))
    with pytest.raises(RequestError) as error:
        hugging_face_operators.written(job(*HF, "parallel.grid.tp=2"))
    text = "auto: the config of x has no tensor-parallel plan; name modules one by one"
    assert [str(p) for p in error.value.problems] == [f"parallel.operators: {text}"]
