"""``metrics``: their names, and which data they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.job.schema.data import Text
from launcher.job.schema.job import Job
from launcher.job.schema.objective import BitsPerByte, figure
from launcher.job.schema.user_class import Target
from launcher.plan.values.setting import Setting

METRICS_KEY = "metrics"
TAKEN = (
    "step", "steps", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "step_ms", "step_ms_median",
    "step_ms_worst", "worst_rank", "bubble", "text",
    "memory_mb", "memory_reserved_mb", "tflops", "mfu", "loss_scale", "skipped", "unsaved", "save_stall_ms",
    "baseline",
)  # fmt: skip
"""Names of the figures that every step has."""
KEPT = (
    "saved_step", "best_value", "best_step", "early_stop_value", "early_stop_waited", "load_bytes_read",
    "load_bytes_held",
)  # fmt: skip
"""Names of a run's own state, which are no metrics; names that begin with ``val_`` are reserved too."""


def problems(job: Job) -> Iterator[Problem]:
    """Yields problems for metrics with the same name, and for a metric that the data cannot support."""
    names = [figure(one) for one in job.metrics]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            first = [m for i, m in enumerate(job.metrics) if figure(m) not in names[:i]]
            text = f"two metrics have the name {name}; keep one"
            yield Problem(METRICS_KEY, text, _kept(first))
        elif name in TAKEN:
            yield Problem(METRICS_KEY, f"{name} is reported in every step; rename the class")
        elif name in KEPT or name.startswith("val_"):
            yield Problem(METRICS_KEY, f"{name} is a name that the run uses itself; rename the class")

    known = isinstance(job.data, Text) and job.data.tokenizer != "file"
    if not known and any(isinstance(one, BitsPerByte) for one in job.metrics):
        data_name = getattr(job.data, "name", "of a class of your own")
        of = f"data {data_name}" + (" with tokenizer=file" if isinstance(job.data, Text) else "")
        text = f"bits_per_byte: {of} does not say how many bytes of text a token stands for"
        yield Problem(METRICS_KEY, text, _kept([m for m in job.metrics if not isinstance(m, BitsPerByte)]))


def _kept(metrics: Sequence[object]) -> str:
    """Returns the override that keeps ``metrics``; "" if one of them is more than a name."""
    if any(isinstance(m, Target) or figure(m) != getattr(m, "name", "") for m in metrics):
        return ""
    return f"'{METRICS_KEY}=[{','.join(map(figure, metrics))}]'"


def rows(job: Job) -> Iterator[Setting]:
    """Yields the setting if there are metrics."""
    if job.metrics:
        names = ", ".join(map(figure, job.metrics))
        why = "computed in evaluations, and in training steps from the samples of the loss"
        yield Setting(METRICS_KEY, names, "applied", why)
