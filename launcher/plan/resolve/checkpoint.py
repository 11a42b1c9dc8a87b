"""Settings of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan import step_order
from launcher.plan.resolve.encryption import PLACE, place_text
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.note import Note
from launcher.plan.values.setting import Outcome, Setting

HOUR = 3600  # seconds


STREAM = "rng."
"""The prefix of a rank's random streams in checkpoints; a kind of device, "python" or "numpy" follows."""

AVERAGE = "ema/weights"
"""The key of a weight's moving average in its optimizer state; no optimizer uses such a key."""

AVERAGED = "_ema"
"""The suffix of figures that are computed with the moving average."""


def problems(job: Job) -> Iterator[Problem]:
    """Yields a problem if ``checkpoint.encrypt`` is not the place of a key; the value is not shown."""
    if job.checkpoint.encrypt is not None and not PLACE.fullmatch(job.checkpoint.encrypt):
        text = "this does not say where the key is; never put the key itself into a configuration"
        yield Problem("checkpoint.encrypt", text, "checkpoint.encrypt=env:CHECKPOINT_KEY")


def rows(job: Job) -> Iterator[Setting]:
    """Yields the settings that are not at their default."""
    checkpoint = job.checkpoint
    if checkpoint.asynchronous:
        yield Setting("checkpoint.async", "true", *_asynchronous(job))

    if checkpoint.encrypt is not None:
        why = "tensor files are encrypted with AES-256-GCM, the manifest has a MAC of the same key"
        why += "; names, shapes and digests of tensors stay readable"
        yield Setting("checkpoint.encrypt", place_text(checkpoint.encrypt), "applied", why)

    if checkpoint.accept_plain:
        yield Setting("checkpoint.accept_plain", "true", *_plain(job))

    if checkpoint.accept_changes:
        why = "training resumes from a checkpoint although these changed"
        yield Setting("checkpoint.accept_changes", ", ".join(checkpoint.accept_changes), "applied", why)


def _asynchronous(job: Job) -> Outcome:
    if job.checkpoint.every is None or not any(step.kind == "train" for step in job.steps.values()):
        return "satisfied", "nothing is saved while training"
    why = "a thread writes checkpoints from a copy in host memory; training waits only for that copy"
    return "applied", why


def _plain(job: Job) -> Outcome:
    if job.checkpoint.encrypt is None:
        return "satisfied", "without checkpoint.encrypt every checkpoint is read"
    return "applied", "checkpoints that are not encrypted are read too, unverified"


def misnamed(skeleton: ModelStructure, device: str) -> list[Problem]:
    """Returns problems for tensors whose names checkpoints use for optimizer state or random streams.

    ``device`` is the requested kind; the kind that ``auto`` selects is checked where it is known.
    """
    learning = [p.name for p in skeleton.params if p.trainable and not p.buffer]
    names = [p.name for p in skeleton.params]
    states = [(name, _state_of(name, learning)) for name in names]
    problems = [_misnamed(name, state) for name, state in states if state is not None]
    return [*problems, *streams_misnamed(names, ("cpu", "python", "numpy", device))]


def streams_misnamed(names: Iterable[str], kinds: Collection[str]) -> list[Problem]:
    """Returns problems for tensors with the name of a random stream of one of the ``kinds`` of device."""
    streams = {f"{STREAM}{kind}" for kind in kinds}
    return [_misnamed(name, "a random stream") for name in names if name in streams]


def _misnamed(name: str, purpose: str) -> Problem:
    text = f"{name} has the name that checkpoints use for {purpose}, and would overwrite it"
    return Problem("model", f"{text}; rename its module")


def _state_of(name: str, learning: Sequence[str]) -> str | None:
    """Describes the optimizer state that a checkpoint stores under ``name``; ``None`` if there is none."""
    if not name.startswith("optim."):
        return None
    for param in learning:
        if re.fullmatch(rf"optim\..+\.{re.escape(param)}", name):
            return f"optimizer state of {param}"
    return None


def unsaved(job: Job, steps: int, seconds: float) -> Iterator[Note]:
    """Yields a note if a failure would lose an hour of training or more.

    The training has ``steps`` steps that take ``seconds`` each, as predicted.
    """
    if job.checkpoint.every is not None or job.checkpoint.best is not None:
        return

    # the longest sequence of trainings without a save in between; each ``train`` has an equal share of steps
    kinds = [step.kind for step in job.steps.values()]
    rows = " ".join(kind for kind in kinds if kind in ("train", "save")).split("save")
    longest = max(row.count("train") for row in rows)
    hours = seconds * steps * longest / max(kinds.count("train"), 1) / HOUR
    if hours < 1:
        return

    every = _round_down(HOUR / 2 / seconds)
    cure = f"checkpoint.every={every} saves every {seconds * every / 60:.0f} minutes"
    if rows[-1]:
        names = [step_order.choice(name, step.kind) for name, step in job.steps.items()]
        names.insert(len(kinds) - kinds[::-1].index("train"), "save")
        cure += f" and {quote('steps=[' + ','.join(names) + ']')} at the end"
    text = f"nothing is saved before the end, so a failure may lose {hours:.1f} hours of training (predicted)"
    yield Note("checkpoint.every", f"null: {text}; {cure}")


def _round_down(n: float) -> int:
    """Returns the largest of 1, 2, 5, 10, 20, 50 and so on that is not above ``n``; at least 1.

    >>> [_round_down(n) for n in (0.3, 1.9, 7, 545, 2000)]
    [1, 1, 5, 500, 2000]
    """
    power: int = 10 ** max(len(str(int(n))) - 1, 0)
    return max(digit for digit in (1, 2, 5) if digit * power <= max(n, 1)) * power
