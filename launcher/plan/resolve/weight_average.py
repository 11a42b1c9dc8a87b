"""``train.ema``: the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import many

EMA = "train.ema"
LOW_PRECISION = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def problems(job: Job) -> Iterator[Problem]:
    """Yields problems for steps that read a moving average which does not exist."""
    for name, step in job.steps.items():
        if not isinstance(step, Evaluate | Export) or step.weights == "trained":
            continue
        key = f"steps.{name}.weights"
        if isinstance(step, Evaluate) and step.of != "run":
            text = f"ema: with of={step.of} the step evaluates the weights that were written"
            yield Problem(key, f"{text}; to export the moving average, set weights=ema of the step export")
        elif job.train.ema is None and not (isinstance(step, Export) and step.src is not None):
            text = "ema: without train.ema there is no moving average of the weights"
            yield Problem(key, text, f"{EMA}={{}}")


def param_problems(job: Job, params: Iterable[Placed]) -> Iterator[Problem]:
    """Yields a problem if weights have a dtype that rounds away the update of an average."""
    if job.train.ema is None:
        return
    low = next((p for p in params if p.trainable and not p.buffer and p.spec.dtype in LOW_PRECISION), None)
    if low is not None:
        text = f"{low.name} is kept in {low.spec.dtype}, which rounds away what a step adds to an average"
        yield Problem(EMA, f"{text}; keep the weights that are trained in fp32", f"{EMA}=null")


def rows(job: Job) -> Iterator[Setting]:
    """Yields the decay, if there is an average."""
    if job.train.ema is None:
        return
    often = "every step" if job.train.ema.every == 1 else f"every {many(job.train.ema.every, 'step')}"
    why = f"{often}, on each rank's own pieces of the weights that are trained, in their dtype"
    yield Setting(f"{EMA}.decay", f"{job.train.ema.decay:g}", "applied", why)
