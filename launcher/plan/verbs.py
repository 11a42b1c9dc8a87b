"""The table of verbs: where a step runs, what it needs, what it produces, and the module that does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from launcher.job.schema import steps
from launcher.job.schema.base import Settings
from launcher.job.schema.job import Job
from launcher.job.schema.paths import BEST
from launcher.job.schema.steps import Step

Where = Literal["ranks", "alone", "files"]
"""A step runs on all ranks, in one process that has the full model, or without torch on files."""

CHECKPOINT, TRANSFORMED, EXPORTED = "a checkpoint", "a transformed checkpoint", "an exported model"


@dataclass(frozen=True)
class Verb:
    """The facts about a verb that are known before its module is imported.

    A new verb needs a row here and a module.

    ``settings`` is its pydantic model, which the union ``Step`` of the schema lists too. ``launcher.steps``
    documents what ``module`` contains. ``checks``: the module also checks a step before anything starts, so
    it must not import torch. ``where`` and ``needs`` may depend on the settings of a step. ``leaves``: what
    it produces for later steps. ``source`` and ``output`` are the settings that name what it reads and what
    it writes; a step that names its source needs nothing from earlier steps. ``best``: the source may be the
    run's best checkpoint. ``trains``: it changes the weights by training. ``checkpoints``: it writes
    checkpoints of the run. ``brings``: its weights come from elsewhere. ``copies``: it trains copies of the
    run, before the run's model exists.
    """

    settings: type[Settings]
    module: str
    where: Where | Callable[[Any], Where]
    needs: str | Callable[[Any], str] = ""
    leaves: str = ""
    source: str = ""
    best: bool = False
    output: str = ""
    checks: bool = False
    trains: bool = False
    checkpoints: bool = False
    brings: bool = False
    copies: bool = False


def _evaluated(step: steps.Evaluate) -> Where:
    return "ranks" if step.of == "run" else "alone"


def _needed(step: steps.Evaluate) -> str:
    return {"run": "", "transformed": TRANSFORMED, "exported": EXPORTED}[step.of]


def _exported(step: steps.Export) -> Where:
    return "alone" if step.check else "files"


# If two verbs produce the same thing, a request that lacks it is offered the first one.
VERBS: Final[Mapping[str, Verb]] = {
    "train": Verb(steps.Train, "launcher.steps.train", "ranks", trains=True, checkpoints=True),
    "evaluate": Verb(steps.Evaluate, "launcher.steps.evaluate", _evaluated, _needed),
    "predict": Verb(steps.Predict, "launcher.steps.predict", "ranks", checks=True),
    "sync_shared": Verb(steps.SyncShared, "launcher.steps.sync_shared", "ranks"),
    "save": Verb(steps.Save, "launcher.steps.save", "ranks", leaves=CHECKPOINT, checkpoints=True),
    "load": Verb(
        steps.Load, "launcher.steps.load", "ranks", CHECKPOINT, source="path", best=True, brings=True,
    ),
    "broadcast": Verb(steps.Broadcast, "launcher.steps.broadcast", "ranks"),
    "certify": Verb(steps.Certify, "launcher.steps.certify", "ranks", copies=True),
    "calibrate": Verb(
        steps.Calibrate, "launcher.extras.calibration.calibrate", "ranks", checks=True, copies=True,
    ),
    "import": Verb(
        steps.Import, "launcher.steps.import_weights", "files",
        leaves=CHECKPOINT, source="src", checks=True, checkpoints=True, brings=True,
    ),
    "transform": Verb(
        steps.Transform, "launcher.steps.transform", "files",
        needs=CHECKPOINT, leaves=TRANSFORMED, source="src", best=True, output="dst", checks=True,
    ),
    "export": Verb(
        steps.Export, "launcher.steps.export", _exported,
        needs=CHECKPOINT, leaves=EXPORTED, source="src", best=True, output="path", checks=True,
    ),
    "merge_strategies": Verb(
        steps.MergeStrategies, "launcher.extras.mindspore.merge_step", "files",
        CHECKPOINT, source="src", output="dst", checks=True,
    ),
    "verify": Verb(
        steps.Verify, "launcher.steps.verify", "files", CHECKPOINT, source="src", best=True, checks=True,
    ),
    "inspect": Verb(
        steps.Inspect, "launcher.steps.inspect", "files", CHECKPOINT, source="src", best=True, checks=True,
    ),
    "sample": Verb(steps.Sample, "launcher.steps.sample", "alone", EXPORTED),
    "prepare": Verb(steps.Prepare, "launcher.steps.prepare", "files", output="dst", checks=True),
}  # fmt: skip


def verb(step: Step) -> Verb:
    """Returns the row of a step's verb."""
    return VERBS[step.kind]


def where(step: Step) -> Where:
    """Returns where a step runs."""
    place = verb(step).where
    return place(step) if callable(place) else place


def reads_best(step: Step) -> bool:
    """Returns true if the step reads the best checkpoint of the run."""
    row = verb(step)
    return row.best and getattr(step, row.source) == BEST


def needs(step: Step) -> str:
    """Returns what earlier steps must have produced; ``""`` if nothing."""
    row = verb(step)
    if row.source and getattr(step, row.source) is not None:
        return ""
    return row.needs(step) if callable(row.needs) else row.needs


def output(step: Step) -> str | None:
    """Returns the output that a step names; ``None`` if it writes nothing, or into the run's folder."""
    row = verb(step)
    return getattr(step, row.output) if row.output else None


def writes(step: Step) -> bool:
    """Returns true if the step writes files that a later step may read."""
    row = verb(step)
    return row.checkpoints or bool(row.output)


def saves_on_ranks(step: Step) -> bool:
    """Returns true if the ranks write checkpoints of the run in this step."""
    return verb(step).checkpoints and where(step) == "ranks"


def trains(job: Job) -> bool:
    """Returns true if the run trains; a certificate or a calibration trains copies of its own."""
    return any(step.kind == "train" for step in job.steps.values())


def evaluates(step: Step) -> bool:
    """Returns true if the step runs the model in evaluation mode, on held-out or other samples."""
    return isinstance(step, steps.Evaluate | steps.Predict) or (isinstance(step, steps.Export) and step.check)


def starts(step: Step) -> bool:
    """Returns true if the ranks start from weights of this step, which runs before the ranks exist."""
    return verb(step).brings and where(step) != "ranks"


def loads(step: Step) -> bool:
    """Returns true if the step loads weights into ranks that are running."""
    return verb(step).brings and where(step) == "ranks"
