"""Judges settings that differ from those of the checkpoint: refused, accepted or noted."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from launcher.checkpoint.read import Checkpoint
from launcher.data.cifar10_fallback import with_data_read
from launcher.data.file_digests import contents
from launcher.errors import Problem, printable
from launcher.job.schema import redact
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.job import Job
from launcher.job.schema.optim import Constant, CosineRestarts
from launcher.job.schema.user_class import Target
from launcher.optim.schedule import factor
from launcher.plan.may_change_on_resume import CHOSEN, DERIVED, Difference, differences
from launcher.plan.plan import Plan
from launcher.plan.values.note import Note

ACCEPT = "checkpoint.accept_changes"
LONGEST_VALUE = 60


def unknown(job: Job) -> Iterator[Problem]:
    """Yields a problem for each name in ``accept_changes`` that is not a setting."""
    from launcher.job.schema import keys as schema_keys

    known = [
        *schema_keys.everywhere(),
        *(f"{s}.{name}" for s in CHOSEN for name in _arguments(getattr(job, s))),
    ]
    for key in job.checkpoint.accept_changes:
        if key not in known:
            meant = nearest(key, known)
            suggestion = did_you_mean(meant)
            right = [meant if k == key else k for k in job.checkpoint.accept_changes]
            cure = _pasted(ACCEPT, right) if meant else ""
            yield Problem(ACCEPT, f"there is no setting {key!r}{suggestion}", cure)


def _arguments(settings: Any) -> Collection[str]:
    return ("_target_", *settings.arguments) if isinstance(settings, Target) else ()


def changes(
    checkpoint: Checkpoint, job: Job, plan: Plan, overrides: Sequence[str], misfit: bool
) -> tuple[list[Problem], list[Note]]:
    """Returns the changes that are refused, and notes on those that are accepted.

    ``misfit``: the weights do not fit the model, so accepting a change of ``model`` or ``train`` is not
    proposed.
    """
    saved, done = checkpoint.state.get("settings"), int(checkpoint.state["step"])
    if saved is None:
        text = "the checkpoint is too old to say how it was trained, so nothing is compared"
        return [], [Note("checkpoint", f"{checkpoint.folder}: {text}")]
    try:
        read = with_data_read(job)
        changed = differences(saved if isinstance(saved, dict) else {}, read, plan, contents(read.data))
    except ValueError as error:
        return [Problem("", f"{checkpoint.folder}: {error}")], []

    # changes that matter to trained weights and are not accepted
    accepted = job.checkpoint.accept_changes
    refused = [d for d in changed if d.why and done and not _covered(d.key, accepted)]
    keep = [d.key for d in refused if not _back(d, saved, job) or sets(overrides, d.key)]
    every = _pasted(ACCEPT, [*accepted, *keep])

    # the cures: accept intended changes, revert the others
    problems = []
    for d in refused:
        own = _pasted(ACCEPT, [*accepted, d.key])
        fixed = misfit and d.key.partition(".")[0] in ("model", "train")
        new, old = _value_text(d.new), _value_text(d.old)
        old = "another value, which is hidden" if old == new else old
        text = f"{new}: {checkpoint.folder} was trained with {old}: {d.why}"
        if d.key in keep:
            problems.append(Problem(d.key, text, "" if fixed else every))
        else:
            also = "" if fixed else f"; {own} allows the change"
            problems.append(Problem(d.key, f"{text}{also}", _back(d, saved, job)))
    return problems, [_note(d, checkpoint.folder.name, done, job) for d in changed if d not in refused]


def sets(overrides: Sequence[str], key: str) -> bool:
    """Returns true if an override sets ``key``, a key below it, or a section that contains it."""
    words = (o.partition("=")[0].lstrip("+~") for o in overrides)
    return any(_covered(key, [word]) or _covered(word, [key]) for word in words)


def _covered(key: str, keys: Collection[str]) -> bool:
    return any(key == k or key.startswith(f"{k}.") for k in keys)


def _back(d: Difference, saved: Mapping[str, Any], job: Job) -> str:
    """Returns the override that restores the old value, if there is one."""
    section, _, last = d.key.partition(".")
    if d.key in CHOSEN or last in ("name", "_target_"):
        section_values = {k.partition(".")[2]: v for k, v in saved.items() if k.startswith(f"{section}.")}
        return _pasted(section, section_values) if section_values else ""
    if d.key in DERIVED:
        now = job.model_dump(mode="json")["parallel"]
        for name in d.key.split(".")[1:]:
            now = now[name]
        return _pasted(d.key, saved[d.key]) if saved.get(d.key, now) != now else ""
    return _pasted(d.key, d.old) if d.key in saved and saved[d.key] == d.old else ""


def _pasted(key: str, value: Any) -> str:
    """Returns an override; "" if it would contain a hidden secret."""
    from launcher.job.overrides import paste  # imports Hydra, which joining ranks do not need

    return "" if redact.HIDDEN in json.dumps(value) else paste(key, value)


def _value_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = printable(redact.without_digests(text))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 4]} ..."


def _note(d: Difference, name: str, done: int, job: Job) -> Note:
    change = f"{_value_text(d.old)} -> {_value_text(d.new)}: since {name}"
    if d.key == "train.steps":
        return Note(d.key, f"{change}{_curve(d, done, job)}")
    if d.why and done:
        return Note(d.key, f"{change}; checkpoint.accept_changes allows it: {d.why}")
    return Note(d.key, change if done else f"{change}, before any training")


def _curve(d: Difference, done: int, job: Job) -> str:
    """Describes how a changed number of steps changes the learning rate of the next step."""
    schedule = job.schedule
    if isinstance(schedule, Constant | CosineRestarts | Target):  # independent of the number of steps
        return ""
    if not isinstance(d.old, int) or done >= d.new:
        return ""
    new, old = (factor(schedule, done, total) for total in (d.new, d.old))
    text = f"; schedule={schedule.name} depends on the total number of steps, so the curve changes"
    rates = f": step {done + 1} is at {new:.3g} of optim.lr, on the old curve at {old:.3g}"
    return text if new == old else f"{text}{rates}"
