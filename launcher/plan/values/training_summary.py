"""The parts of a training that no layout changes: data, optimizer, learning rate, clipping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.job.schema.job import Job
from launcher.job.schema.optim import WSD, Constant, CosineRestarts, NamedSchedule, Polynomial
from launcher.job.schema.user_class import Target
from launcher.plan.values.text import many, scaled

SHOWN = ("lr", "momentum", "nesterov", "betas", "weight_decay")
"""Settings of an optimizer that a line of the plan shows; ``plan.json`` has all of them."""
Pairs = tuple[tuple[str, bool | int | float | str | tuple[float, float] | None], ...]
"""Names with their values; the name of a nested value has dots."""


@dataclass(frozen=True)
class TrainingSummary:
    """The summary of a training in a plan.

    ``samples`` and ``tokens`` count all ``steps``; ``tokens`` is ``None`` if samples have no tokens.
    ``epochs``: the requested epochs that ``steps`` follows from; ``None`` if steps were requested.
    ``optimizer`` and ``schedule``: settings by name; for a user's class only its ``_target_``. ``groups``:
    the number of parameter groups with settings of their own. ``learning_rate``: the schedule as a line.
    ``clip_norm``: the largest norm of a step's gradient.
    """

    data: str
    samples: int
    tokens: int | None
    steps: int
    epochs: int | None
    optimizer: Pairs
    groups: int
    schedule: Pairs
    learning_rate: str
    clip_norm: float | None

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields pairs of a label and its line."""
        number, prefix = scaled(self.tokens or 0)
        tokens = "" if self.tokens is None else f", {number}{prefix} tokens"
        length = many(self.steps, "step")
        if self.epochs is not None:
            length = f"{many(self.epochs, 'epoch')}, {length}"
        yield "data", f"{self.data}: {self.samples:,} sample{'s' * (self.samples != 1)}{tokens} in {length}"
        yield "optimizer", _optimizer(self.optimizer, self.groups)
        yield "lr", self.learning_rate
        clipping = "none (train.clip_norm=null)"
        if self.clip_norm is not None:
            clipping = (
                f"a gradient with a norm above {self.clip_norm:g} is scaled down to it (train.clip_norm)"
            )
        yield "clipping", clipping


def training(
    job: Job, *, batch: int, tokens: int | None, steps: int, epochs: int | None
) -> TrainingSummary | None:
    """Returns the training of ``job``; ``None`` if no step trains. ``batch`` and ``tokens`` are per step."""
    if not any(step.kind == "train" for step in job.steps.values()):
        return None
    groups = {} if isinstance(job.optim, Target) else job.optim.groups
    return TrainingSummary(
        data=_name(job.data),
        samples=batch * steps,
        tokens=None if tokens is None else tokens * steps,
        steps=steps,
        epochs=epochs,
        optimizer=_settings(job.optim),
        groups=len(groups),
        schedule=_settings(job.schedule),
        learning_rate=_learning_rate(job, steps),
        clip_norm=job.train.clip_norm,
    )


def _name(chosen: Any) -> str:
    return chosen.target if isinstance(chosen, Target) else str(chosen.name)


def _settings(chosen: Any) -> Pairs:
    """Returns settings by name; for a user's class only its path, because its arguments may be secret."""
    if isinstance(chosen, Target):
        return (("_target_", chosen.target),)
    return tuple(_pairs({k: v for k, v in chosen.model_dump().items() if k != "groups"}))


def _pairs(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _optimizer(pairs: Pairs, groups: int) -> str:
    """Describes the optimizer in one line.

    >>> _optimizer((("name", "sgd"), ("lr", 0.1), ("momentum", 0.9), ("nesterov", False)), 1)
    'sgd: lr 0.1, momentum 0.9; 1 group of parameters with their own settings'
    """
    settings = dict(pairs)
    if "_target_" in settings:
        return str(settings["_target_"])
    text = f"{settings['name']}: {_values(settings)}"
    if others := {k.removeprefix("adamw."): v for k, v in pairs if k.startswith("adamw.")}:
        text = f"{text}; adamw for parameters that are not matrices: {_values(others)}"
    if groups:
        text = f"{text}; {many(groups, 'group')} of parameters with their own settings"
    return text


def _values(settings: Mapping[str, Any]) -> str:
    shown = {k: settings[k] for k in SHOWN if settings.get(k) not in (None, False)}
    return ", ".join(f"{k} {_value(v)}" for k, v in shown.items())


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return "true" if value is True else f"{value:g}"


def _learning_rate(job: Job, steps: int) -> str:
    """Describes the learning-rate schedule."""
    schedule = job.schedule
    if isinstance(schedule, Target):
        return schedule.target
    warm = schedule.warmup_steps
    if warm >= steps:
        return f"{schedule.name}: warm-up takes {many(warm, 'step')}, and the training has only {steps}"
    first = f"{many(warm, 'step')} of warm-up, then " if warm else ""
    return f"{schedule.name}: {first}{_shape(schedule, steps)}"


def _shape(schedule: NamedSchedule, steps: int) -> str:
    if isinstance(schedule, Constant):
        return "lr in every step"
    if isinstance(schedule, CosineRestarts):
        periods = f"periods of {many(schedule.period_steps, 'step')}"
        if schedule.period_multiplier > 1:
            periods = f"{periods}, each {schedule.period_multiplier} times as long as the one before"
        return f"from lr down to {schedule.final:g} of it in {periods}"
    if isinstance(schedule, WSD):
        decay = min(schedule.decay(steps), steps - schedule.warmup_steps)
        return f"lr, and down to {schedule.final:g} of it in the last {many(decay, 'step')}"
    power = f", by a power of {schedule.power:g}" if isinstance(schedule, Polynomial) else ""
    return f"from lr down to {schedule.final:g} of it at step {steps}{power}"
