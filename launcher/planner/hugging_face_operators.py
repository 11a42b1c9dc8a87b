"""``parallel.operators=auto``: the strategies that transformers has for a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.plan.tensor_parallel.strategy_reader import TP

OPERATORS, AUTO = "parallel.operators", "auto"
GATHERED = "_gather_output"
COLUMNS: dict[str, Any] = {"weight": [TP, None]}
GATHERED_COLUMNS: dict[str, Any] = COLUMNS | {"output": ["dp", None, None]}
ROWS: dict[str, Any] = {"weight": [None, TP]}
STRATEGIES = {
    "colwise": COLUMNS,
    f"colwise{GATHERED}": GATHERED_COLUMNS,
    "rowwise": ROWS,
    "rowwise_split_input": ROWS,
    "embedding_rowwise": COLUMNS,
}
ATTENTION = ("q_proj", "k_proj", "v_proj")


def operators_are_open(job: Job) -> bool:
    return bool(job.parallel.operators.get(AUTO) is True)


def problems(job: Job) -> Iterator[Problem]:
    """Yields problems of a request with ``operators=auto`` that show before the model's config is read."""
    if not operators_are_open(job):
        return
    if not isinstance(job.model, HuggingFace):
        text = f"auto: only models of transformers have a tensor-parallel plan; the model is {_named(job)}"
        yield Problem(OPERATORS, text, "operators=megatron" if _named(job) == "lm" else "")
    elif job.parallel.grid.tp is None:
        yield Problem(OPERATORS, "auto: the size of tp is missing", "parallel.grid.tp=2")


def _named(job: Job) -> str:
    return str(getattr(job.model, "name", None) or getattr(job.model, "target", "none"))


def with_placeholder_operators(job: Job) -> Job:
    """Sets one sharded operator in place of ``auto``, until the config of transformers is read."""
    return _with(job, {**job.parallel.operators, AUTO: COLUMNS}) if operators_are_open(job) else job


def _with(job: Job, operators: dict[str, Any]) -> Job:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"operators": operators})})


def written(job: Job) -> Job:
    """Replaces ``auto`` by one strategy per module. Raises ``RequestError`` if transformers has none."""
    assert isinstance(job.model, HuggingFace)
    from launcher.models.hugging_face import heads, tp_plan

    styles, tp = tp_plan(job.model), job.parallel.grid.tp or 1
    if not styles:
        text = f"auto: the config of {job.model.path} has no tensor-parallel plan; name modules one by one"
        raise RequestError((Problem(OPERATORS, text),))
    if any(n % tp for n in heads(job.model)):
        styles = {
            glob: f"{style}{GATHERED}" if glob.endswith(ATTENTION) and style == "colwise" else style
            for glob, style in styles.items()
        }
    # the loss takes logits that are sharded over the vocabulary; experts have weights but no modules
    experts = tuple(f"{glob}." for glob, style in styles.items() if style.startswith("moe_"))
    cut = {g: s for g, s in styles.items() if s in STRATEGIES and not g.startswith(experts)}
    strategies = {glob: _strategy(glob, style) for glob, style in cut.items()}
    own = {k: v for k, v in job.parallel.operators.items() if k != AUTO}
    return _with(job, strategies | own)


def _strategy(glob: str, style: str) -> dict[str, Any]:
    return COLUMNS if "." not in glob else STRATEGIES[style]
