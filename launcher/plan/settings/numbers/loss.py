"""``loss``: what is summed over a global batch, and what that is divided by."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.components import Target
from launcher.job.schema.job import Job
from launcher.job.schema.objectives import CrossEntropy, figure
from launcher.plan.values.facts import IGNORED
from launcher.plan.values.objective import Objective
from launcher.plan.values.setting import Setting

OWN = "_target_"
OVER = {
    "cross_entropy": "the number of targets that count",
    "mse": "the number of elements",
    "bce": "the number of elements",
    OWN: "its count(target)",
}


def objective(job: Job) -> Objective:
    loss = job.loss
    whole = any(isinstance(one, Target) for one in (loss, *job.metrics))
    return Objective(
        loss=OWN if isinstance(loss, Target) else loss.name,
        ignored=loss.ignore_index if isinstance(loss, CrossEntropy) else IGNORED,
        metrics=tuple(map(figure, job.metrics)),
        ranked=tuple((figure(m), getattr(m, "k", 0)) for m in job.metrics if not isinstance(m, Target)),
        whole=whole,
    )


def rows(job: Job) -> Iterator[Setting]:
    """Yields the setting unless it is torch's plain cross entropy."""
    if job.loss == CrossEntropy():
        return
    kind, value = objective(job).loss, job.loss.target if isinstance(job.loss, Target) else job.loss.name
    keys = job.loss.model_dump(exclude_defaults=True) if isinstance(job.loss, CrossEntropy) else {}
    said = "".join(f", {key} {number:g}" for key, number in keys.items() if key != "name")
    yield Setting(
        "loss", f"{value}{said}", "applied", f"the sum over the global batch, divided by {OVER[kind]}"
    )
