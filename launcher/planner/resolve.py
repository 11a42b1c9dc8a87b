"""Values that files, data and the model's config decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher.errors import Problem, RequestError, user_error
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.job import Job
from launcher.job.schema.optim import Constant
from launcher.plan.tensor_parallel.strategy_reader import TP
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import Resolved
from launcher.plan.values.text import many

EPOCHS = "train.epochs"
UNENDING = 1 << 53
"""A length from which on a data set counts as endless."""


def steps_are_open(job: Job) -> bool:
    """Whether the number of steps has still to be computed."""
    return job.train.steps is None


def with_placeholder_steps(job: Job) -> Job:
    """A placeholder until the data is opened: one step at a constant rate, which one step is enough for."""
    return (
        _lasting(job, 1).model_copy(update={"schedule": Constant(name="constant")})
        if steps_are_open(job)
        else job
    )


def with_steps(resolved: Resolved) -> Resolved:
    """Computes ``train.steps`` from ``train.epochs``.

    Epochs follow each other without a gap: the last batch continues into the next epoch, so that every sample
    of the last epoch is trained on. Raises ``RequestError`` if the number of samples is unknown.
    """
    job, epochs = resolved.job, resolved.job.train.epochs
    if not steps_are_open(job) or epochs is None:
        return resolved
    n = _samples(job)
    n = n if job.debug.overfit is None else min(n, job.debug.overfit)
    # ceil; an empty data set of the user is refused when its first sample is requested
    steps = max(1, -(-epochs * n // job.train.batch_size))
    return replace(resolved, job=_lasting(job, steps), epoch_samples=n)


def steps_note(resolved: Resolved) -> Iterator[Note]:
    """Notes how the number of steps was computed."""
    train, samples = resolved.job.train, resolved.epoch_samples
    if samples is not None and train.epochs is not None:
        text = f"null -> {train.steps}: {many(train.epochs, 'epoch')} of {many(samples, 'sample')}"
        if rest := train.epochs * samples % train.batch_size:
            text += f"; the last step has {rest} of them, and the first ones of the epoch that would follow"
        yield Note("train.steps", text)


def _lasting(job: Job, steps: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})


def _samples(job: Job) -> int:
    """The number of training samples in an epoch."""
    from launcher.data.open import open_data

    name = getattr(job.data, "target", "")
    try:
        n = len(open_data(job.data, seed=job.seed, allow=job.security.allow).train)
    except Exception as error:
        if isinstance(error, RequestError) or not name:
            raise
        raise _endless(job, f"the samples of {name} cannot be counted: {user_error(error)}") from None
    if n >= UNENDING:
        raise _endless(job, f"{name} has {n} samples, more than any training can read")
    return n


def _endless(job: Job, why: str) -> RequestError:
    """An error without a cure: the intended number of steps is unknown too."""
    text = f"{job.train.epochs}: {why}; say how long to train in train.steps"
    return RequestError((Problem(EPOCHS, text),))


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
    """Problems of a request with ``operators=auto`` that show before the model's config is read."""
    if not operators_are_open(job):
        return
    if not isinstance(job.model, HuggingFace):
        text = f"auto: only a model of transformers says how to cut it, but the model is {_named(job)}"
        yield Problem(OPERATORS, text, "operators=megatron" if _named(job) == "lm" else "")
    elif job.parallel.grid.tp is None:
        yield Problem(OPERATORS, "auto: it does not say over how many ranks", "parallel.grid.tp=2")


def _named(job: Job) -> str:
    return str(getattr(job.model, "name", None) or getattr(job.model, "target", "none"))


def with_placeholder_operators(job: Job) -> Job:
    """A placeholder until transformers' config is read: one sharded operator, not looked up by name yet."""
    return _with(job, {**job.parallel.operators, AUTO: COLUMNS}) if operators_are_open(job) else job


def _with(job: Job, operators: dict[str, Any]) -> Job:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"operators": operators})})


def written(job: Job) -> Job:
    """Replaces ``auto`` by one strategy per module. Raises ``RequestError`` if transformers has none."""
    assert isinstance(job.model, HuggingFace)
    from launcher.models.hugging_face import heads, tp_plan

    styles, tp = tp_plan(job.model), job.parallel.grid.tp or 1
    if not styles:
        text = f"auto: the config of {job.model.path} says nothing about tp: name modules one by one"
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


ROUTER_LOSSES = (
    "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_aux_loss_coeff",
)  # fmt: skip
"""Config keys with the weight of a router loss, if transformers computes the loss."""


def untrained_losses(job: Job) -> list[Note]:
    """Notes the losses that the config requests but the launcher does not train."""
    if not isinstance(job.model, HuggingFace):
        return []
    from launcher.models.hugging_face import config_of

    config = config_of(job.model)
    named = [(key, getattr(config, key, None)) for key in ROUTER_LOSSES]
    losses = [f"{key} {value}" for key, value in named if isinstance(value, int | float) and value]
    text = f"{', '.join(losses)} of its config has no effect: no loss of routers is trained"
    return [Note("model", text)] if losses else []
