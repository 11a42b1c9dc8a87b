"""The loss, the metrics, and packed documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.job.schema.components import Chat, Target, Text, Tokens, apart
from launcher.job.schema.job import Job
from launcher.job.schema.objective import BitsPerByte, CrossEntropy, figure
from launcher.plan.values.facts import IGNORED
from launcher.plan.values.setting import Setting

METRICS_KEY = "metrics"
TAKEN = (
    "step", "steps", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "step_ms", "step_ms_median",
    "step_ms_worst", "worst_rank", "bubble", "text",
    "memory_mb", "loss_scale", "skipped", "unsaved", "save_stall_ms", "baseline",
)  # fmt: skip
"""Names of the figures that every step has."""


def metric_problems(job: Job) -> Iterator[Problem]:
    """Yields problems for metrics with the same name, and for a metric that the data cannot support."""
    names = [figure(one) for one in job.metrics]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            first = [m for i, m in enumerate(job.metrics) if figure(m) not in names[:i]]
            text = f"two metrics have the name {name}; keep one"
            yield Problem(METRICS_KEY, text, _kept(first))
        elif name in TAKEN:
            yield Problem(METRICS_KEY, f"{name} is reported in every step; rename the class")

    known = isinstance(job.data, Text) and job.data.tokenizer != "file"
    if not known and any(isinstance(one, BitsPerByte) for one in job.metrics):
        data_name = getattr(job.data, "name", "of a class of your own")
        of = f"data {data_name}" + (" with tokenizer=file" if isinstance(job.data, Text) else "")
        text = f"bits_per_byte: {of} does not say how many bytes of text a token stands for"
        yield Problem(METRICS_KEY, text, _kept([m for m in job.metrics if not isinstance(m, BitsPerByte)]))


def _kept(metrics: Sequence[object]) -> str:
    """The override that keeps ``metrics``; "" if one of them is more than a name."""
    if any(isinstance(m, Target) or figure(m) != getattr(m, "name", "") for m in metrics):
        return ""
    return f"'{METRICS_KEY}=[{','.join(map(figure, metrics))}]'"


def metric_rows(job: Job) -> Iterator[Setting]:
    if job.metrics:
        names = ", ".join(map(figure, job.metrics))
        why = "in evaluations, and of the same samples as the loss of a training step"
        yield Setting(METRICS_KEY, names, "applied", why)


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of a training.

    ``loss``: its name, or ``_target_`` for a user's class. ``ignored``: the class number that the loss
    ignores. ``metrics``: the name of each among the figures of a step. ``ranked``: the built-in metrics, each
    with the k of a top-k, otherwise 0. ``needs_full_output``: the loss or a metric is a user's class.
    """

    loss: str = "cross_entropy"
    ignored: int = IGNORED
    metrics: tuple[str, ...] = ()
    ranked: tuple[tuple[str, int], ...] = ()
    needs_full_output: bool = False

    @property
    def classes(self) -> bool:
        """Whether targets are class numbers."""
        return self.loss == "cross_entropy"


TARGET = "_target_"
OVER = {
    "cross_entropy": "the number of targets that count",
    "mse": "the number of elements",
    "bce": "the number of elements",
    TARGET: "its count(target)",
}


def objective(job: Job) -> Objective:
    loss = job.loss
    user_defined = any(isinstance(one, Target) for one in (loss, *job.metrics))
    return Objective(
        loss=TARGET if isinstance(loss, Target) else loss.name,
        ignored=loss.ignore_index if isinstance(loss, CrossEntropy) else IGNORED,
        metrics=tuple(map(figure, job.metrics)),
        ranked=tuple((figure(m), getattr(m, "k", 0)) for m in job.metrics if not isinstance(m, Target)),
        needs_full_output=user_defined,
    )


def loss_rows(job: Job) -> Iterator[Setting]:
    """Yields the setting unless it is torch's plain cross entropy."""
    if job.loss == CrossEntropy():
        return
    kind, value = objective(job).loss, job.loss.target if isinstance(job.loss, Target) else job.loss.name
    keys = job.loss.model_dump(exclude_defaults=True) if isinstance(job.loss, CrossEntropy) else {}
    options = "".join(f", {key} {number:g}" for key, number in keys.items() if key != "name")
    yield Setting(
        "loss", f"{value}{options}", "applied", f"the sum over the global batch, divided by {OVER[kind]}"
    )


MASK, PACKING = "data.document_mask", "data.packing"
PIECES, IGNORE = "parallel.pipeline.seq_chunks", "loss.ignore_index"
WHY = {
    "best_fit": "full documents, several in a window where they fit, and padding, which has no target",
    "single": "one document per window, and padding, which has no target",
}

CHATS = "full conversations, several in a sample where they fit, each kept apart, and padding"


def packing_problems(job: Job) -> Iterator[Problem]:
    """Yields problems for settings that cannot keep documents apart, or that count targets of padding."""
    data, documents, pieces = job.data, apart(job.data), job.parallel.pipeline.seq_chunks
    setting = None if documents is None else f"{documents.key}={documents.value}"
    if setting is not None and isinstance(pieces, int) and pieces > 1:
        text = f"{pieces}: positions restart and attention ends inside a piece with {setting}"
        cure = f"{PIECES}=1 parallel.pipeline.scheduler=1f1b"
        yield Problem(
            PIECES, f"{text}, which pieces of a sequence do not carry over; use full sequences", cure
        )
    if isinstance(data, Chat):
        yield from _ignored(job, "data=chat")
    elif isinstance(data, Tokens) and data.by_document:
        yield from _ignored(job, setting or f"{PACKING}={data.packing}")


def _ignored(job: Job, setting: str) -> Iterator[Problem]:
    """Yields a problem if the loss does not ignore the number that marks targets of padding."""
    if isinstance(job.loss, CrossEntropy) and job.loss.ignore_index != IGNORED:
        text = f"{job.loss.ignore_index}: with {setting} there are targets of {IGNORED}"
        yield Problem(IGNORE, f"{text}, which must be ignored", f"{IGNORE}={IGNORED}")


def packing_rows(job: Job) -> Iterator[Setting]:
    data = job.data
    if isinstance(data, Chat) and data.packing != "single":
        yield Setting(PACKING, data.packing, "applied", CHATS)
    if not isinstance(data, Tokens):
        return
    if data.packing != "windows":
        yield Setting(PACKING, data.packing, "applied", WHY[data.packing])
    if data.document_mask:
        why = "attention within documents, positions restart; a token that ends one has no target"
        yield Setting(MASK, "true", "applied", why)
