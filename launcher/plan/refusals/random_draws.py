"""Notes and refusals for models that draw random numbers in training, which may depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import Effects
from launcher.plan.values.module_names import listed
from launcher.plan.values.note import Note

DROPOUT = "draw in a torch.nn.Dropout module, which the certificate turns off"


def notes(job: Job, effects: Effects, sizes: Sizes) -> Iterator[Note]:
    """Yields notes on losses that differ in another layout, and on how certify steps treat random draws."""
    if not effects.draws:
        return
    if sizes.replicas > 1 or sizes.grid["pp"] > 1:
        text = (
            f"{_listed(effects.draws)}: draws random numbers in training, from a separate "
            "stream for each stage and"
        )
        yield Note("seed", f"{text} data-parallel rank: another layout gives other losses")
    others = _others(effects)
    for name in _certify(job):
        if effects.dropouts:
            yield Note(name, f"{_listed(effects.dropouts)}: the certificate turns dropout off")
        if others:
            text = (
                "the certificate makes draws depend only on the shape, so each layout draws the same numbers"
            )
            yield Note(name, f"{_listed(others)}: {text}")


def problems(job: Job, effects: Effects, pieces: int) -> Iterator[Problem]:
    """Yields a problem for each certify step in which the draws of two layouts cannot be made equal."""
    others = _others(effects)
    where = ""
    if pieces > 1:
        where = "for each piece of a sequence, but one process draws for the full sequence"
    elif job.train.compile is not None:
        where = "in compiled code"
    for name in _certify(job) if others and where else ():
        text = f"{_listed(others)} draws random numbers {where}, so two trainings cannot be compared"
        yield Problem(name, f"{text}; {DROPOUT}, or leave out the certify step")


def _certify(job: Job) -> list[str]:
    return [f"steps.{name}" for name, step in job.steps.items() if step.kind == "certify"]


def _others(effects: Effects) -> tuple[str, ...]:
    return tuple(n for n in effects.draws if n not in effects.dropouts)


def _listed(names: tuple[str, ...]) -> str:
    return listed([n or "the model's own forward" for n in names])
