"""``loss``: how it is summed, and what it is divided by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.job.schema.job import Job
from launcher.job.schema.objective import CrossEntropy, figure
from launcher.job.schema.user_class import Target
from launcher.plan.values.class_dims import IGNORED
from launcher.plan.values.setting import Setting


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of a training.

    ``loss``: its name, or ``_target_`` for a user's class. ``ignored``: the class number that the loss
    ignores. ``metrics``: the name under which each metric is reported. ``ranked``: the built-in metrics, each
    with its k, which is 0 unless it is a top-k metric. ``needs_full_output``: the loss or a metric is a
    user's class.
    """

    loss: str = "cross_entropy"
    ignored: int = IGNORED
    metrics: tuple[str, ...] = ()
    ranked: tuple[tuple[str, int], ...] = ()
    needs_full_output: bool = False

    @property
    def classes(self) -> bool:
        """True if targets are class numbers."""
        return self.loss == "cross_entropy"


TARGET = "_target_"
OVER = {
    "cross_entropy": "the number of targets that count",
    "mse": "the number of elements",
    "bce": "the number of elements",
    TARGET: "its count(target)",
}


def objective(job: Job) -> Objective:
    """Returns the loss and the metrics of ``job``."""
    loss = job.loss
    user_defined = any(isinstance(one, Target) for one in (loss, *job.metrics))
    return Objective(
        loss=TARGET if isinstance(loss, Target) else loss.name,
        ignored=loss.ignore_index if isinstance(loss, CrossEntropy) else IGNORED,
        metrics=tuple(map(figure, job.metrics)),
        ranked=tuple((figure(m), getattr(m, "k", 0)) for m in job.metrics if not isinstance(m, Target)),
        needs_full_output=user_defined,
    )


def rows(job: Job) -> Iterator[Setting]:
    """Yields the setting unless it is torch's plain cross entropy."""
    if job.loss == CrossEntropy():
        return
    kind, value = objective(job).loss, job.loss.target if isinstance(job.loss, Target) else job.loss.name
    keys = job.loss.model_dump(exclude_defaults=True) if isinstance(job.loss, CrossEntropy) else {}
    options = "".join(f", {key} {number:g}" for key, number in keys.items() if key != "name")
    yield Setting(
        "loss", f"{value}{options}", "applied", f"the sum over the global batch, divided by {OVER[kind]}"
    )
