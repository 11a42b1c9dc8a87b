"""``operators=auto``: turns the tensor-parallel plan of a transformers config into operator strategies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.errors import Problem, RequestError
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.job import Job
from launcher.plan.operators.strategy import TP
from launcher.plan.partition.sizes import Note

KEY, AUTO = "parallel.operators", "auto"
GATHERED = "_gather_output"
COLUMNS: dict[str, Any] = {"weight": [TP, None]}
WHOLE: dict[str, Any] = COLUMNS | {"output": ["dp", None, None]}
ROWS: dict[str, Any] = {"weight": [None, TP]}
STRATEGIES = {
    "colwise": COLUMNS,
    f"colwise{GATHERED}": WHOLE,
    "rowwise": ROWS,
    "rowwise_split_input": ROWS,
    "embedding_rowwise": COLUMNS,
}
ATTENTION = ("q_proj", "k_proj", "v_proj")


def asked(job: Job) -> bool:
    return bool(job.parallel.operators.get(AUTO) is True)


def refused(job: Job) -> Iterator[Problem]:
    """Problems of a request with ``operators=auto`` that show before the model's config is read."""
    if not asked(job):
        return
    if not isinstance(job.model, HuggingFace):
        text = f"auto: only a model of transformers says how it is cut, and the model is {_named(job)}"
        yield Problem(KEY, text, "operators=megatron" if _named(job) == "lm" else "")
    elif job.parallel.grid.tp is None:
        yield Problem(KEY, "auto: it does not say over how many ranks", "parallel.grid.tp=2")


def _named(job: Job) -> str:
    return str(getattr(job.model, "name", None) or getattr(job.model, "target", "none"))


def supposed(job: Job) -> Job:
    """A placeholder until transformers' config is read: one sharded operator, not looked up by name yet."""
    return _with(job, {**job.parallel.operators, AUTO: COLUMNS}) if asked(job) else job


def _with(job: Job, operators: dict[str, Any]) -> Job:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"operators": operators})})


def written(job: Job) -> Job:
    """Replaces ``auto`` by one strategy per module. Raises ``RequestError`` if transformers has none."""
    assert isinstance(job.model, HuggingFace)
    from launcher.models.hugging_face import heads, tp_plan

    styles, tp = tp_plan(job.model), job.parallel.grid.tp or 1
    if not styles:
        text = f"auto: the config of {job.model.path} says nothing of tp: name modules by themselves"
        raise RequestError((Problem(KEY, text),))
    if any(n % tp for n in heads(job.model)):
        styles = {
            glob: f"{style}{GATHERED}" if glob.endswith(ATTENTION) and style == "colwise" else style
            for glob, style in styles.items()
        }
    # the loss takes logits that are sharded over the vocabulary; experts have weights but no modules
    experts = tuple(f"{glob}." for glob, style in styles.items() if style.startswith("moe_"))
    cut = {g: s for g, s in styles.items() if s in STRATEGIES and not g.startswith(experts)}
    found = {glob: _strategy(glob, style) for glob, style in cut.items()}
    own = {k: v for k, v in job.parallel.operators.items() if k != AUTO}
    return _with(job, found | own)


def _strategy(glob: str, style: str) -> dict[str, Any]:
    return COLUMNS if "." not in glob else STRATEGIES[style]


ROUTER_LOSSES = (
    "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_aux_loss_coeff",
)  # fmt: skip
"""Config keys with the weight of a router loss, if transformers computes the loss."""


def untrained(job: Job) -> list[Note]:
    """Notes the losses that the config requests but the launcher does not train."""
    if not isinstance(job.model, HuggingFace):
        return []
    from launcher.models.hugging_face import config_of

    config = config_of(job.model)
    named = [(key, getattr(config, key, None)) for key in ROUTER_LOSSES]
    told = [f"{key} {value}" for key, value in named if isinstance(value, int | float) and value]
    text = f"{', '.join(told)} of its config has no effect: no loss of routers is trained"
    return [Note("model", text)] if told else []
