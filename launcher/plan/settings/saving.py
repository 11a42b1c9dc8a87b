"""How checkpoints of a run are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.plan.settings.setting import Setting, Status
from launcher.plan.values.facts import Skeleton

STREAMS = ("rng.cpu", "rng.cuda")
"""What the random streams of a rank are called in its checkpoints."""

PLACE = re.compile(r"(env):([A-Za-z_][A-Za-z0-9_]*)|(file):(.+)")
"""Where a key is: an environment variable, or a file."""


def told(place: str) -> str:
    """Where a key is, for people; without what may be the key itself."""
    return redact.shown(place)


@dataclass(frozen=True)
class Trust:
    """Who must vouch for a checkpoint that is read: whoever has the key at ``key``.

    ``None``: the place of the key that the checkpoint itself names is believed, and so is one that is not encrypted.
    ``plain``: one that is not encrypted is believed although there is a ``key``.
    """

    key: str | None = None
    plain: bool = False


ANYONE = Trust()


def trust(job: Job) -> Trust:
    return Trust(job.checkpoint.encrypt, job.checkpoint.accept_plain)


def resolve(job: Job) -> Iterator[Setting]:
    """Those that are not at their default."""
    if job.checkpoint.asynchronous:
        yield Setting("checkpoint.async", "true", *_asynchronous(job))

    if (place := job.checkpoint.encrypt) is not None:
        why = (
            "tensor files are sealed with AES-256-GCM, the manifest has a MAC of the same key; names, shapes and "
            "digests of tensors stay readable"
        )
        yield Setting("checkpoint.encrypt", told(place), "applied", why)

    if job.checkpoint.accept_plain:
        yield Setting("checkpoint.accept_plain", "true", *_plain(job))

    if accepted := job.checkpoint.accept_changes:
        why = "training goes on from a checkpoint although these may have changed"
        yield Setting("checkpoint.accept_changes", ", ".join(accepted), "applied", why)


def refused(job: Job) -> Iterator[Problem]:
    """A key in the place of where the key is; it is not shown."""
    if job.checkpoint.encrypt is not None and not PLACE.fullmatch(job.checkpoint.encrypt):
        text = "this does not say where the key is; a key itself belongs into no configuration"
        yield Problem("checkpoint.encrypt", text, "checkpoint.encrypt=env:CHECKPOINT_KEY")


def _asynchronous(job: Job) -> tuple[Status, str]:
    if job.checkpoint.every is None or not any(step.kind == "train" for step in job.steps.values()):
        return "satisfied", "nothing is saved while training"
    return "applied", "a thread writes a copy in host memory; training stands still for the copy alone"


def _plain(job: Job) -> tuple[Status, str]:
    if job.checkpoint.encrypt is None:
        return "satisfied", "without checkpoint.encrypt every checkpoint is read"
    return "applied", "checkpoints that are not encrypted are read too; nothing vouches for what they hold"


def misnamed(skeleton: Skeleton) -> list[Problem]:
    """Tensors of the model that a checkpoint would take for optimizer state or for a random stream."""
    learning = [p.name for p in skeleton.params if p.trainable and not p.buffer]
    out = []
    for name in (p.name for p in skeleton.params if p.name.startswith("optim.") or p.name in STREAMS):
        of = next((p for p in learning if re.fullmatch(rf"optim\..+\.{re.escape(p)}", name)), None)
        if of is not None or name in STREAMS:
            what = f"optimizer state of {of}" if of is not None else "a random stream"
            text = f"{name} is called what checkpoints call {what}, and one would overwrite the other"
            out.append(Problem("model", f"{text}; give its module another name"))
    return out
