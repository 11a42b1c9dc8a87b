"""From which checkpoint a run goes on."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.checkpoint.of_plan import of_plan
from launcher.checkpoint.read import Checkpoint, open_checkpoint
from launcher.checkpoint.store import latest
from launcher.checkpoint.strategy import match
from launcher.errors import Problem, RequestError
from launcher.job.models import SGD, AdamW, Momentum, Optim, Target
from launcher.job.schema import Job
from launcher.job.steps import Load
from launcher.plan.plan import Plan
from launcher.plan.saving import trust
from launcher.plan.traits import Traits

RESUME = "checkpoint.resume"


def named(job: Job) -> list[Problem]:
    """What is wrong with the checkpoints that the request names; needs no plan and no torch."""
    found, loads = [], _loads(job)
    if job.checkpoint.resume not in ("auto", "never"):
        found += _closed(RESUME, job.checkpoint.resume, job)
        if comes := [*loads, *(n for n, step in job.steps.items() if step.kind == "import")]:
            text = f"{job.checkpoint.resume}: the step {comes[0]!r} says that the weights come from elsewhere"
            found.append(Problem(RESUME, text))
    for name, path in loads.items():
        found += _closed(f"steps.{name}.path", path, job)
    return found


def _loads(job: Job) -> dict[str, str]:
    """The path of each ``load``, those left out that a ``save`` of this very run may write first."""
    out: dict[str, str] = {}
    saved = False
    home = Path(job.run_dir) if job.run_dir is not None else Path(job.runs) / job.name
    for name, step in job.steps.items():
        saved |= step.kind == "save"
        if isinstance(step, Load) and step.path is not None:
            own = Path(os.path.realpath(step.path)).is_relative_to(os.path.realpath(home))
            out |= {} if saved and own else {name: step.path}
    return out


def _closed(key: str, path: str, job: Job) -> list[Problem]:
    try:
        open_checkpoint(Path(path), trust(job))
    except (ValueError, OSError) as error:
        return [Problem(key, f"{path}: cannot go on from there: {error}")]
    return []


def unfit(job: Job, plan: Plan) -> list[Problem]:
    """What of the checkpoints that the request names is not of the model of ``plan``."""
    found: list[Problem] = []
    if job.checkpoint.resume not in ("auto", "never"):
        found += _unfit(RESUME, open_checkpoint(Path(job.checkpoint.resume), trust(job)), job, plan)
    for name, path in _loads(job).items():
        found += _unfit(f"steps.{name}.path", open_checkpoint(Path(path), trust(job)), job, plan)
    return found


def source(job: Job, plan: Plan, run: Path) -> Path | None:
    """The checkpoint named, or the newest complete one of ``run``. Raises ``RequestError`` if it does not fit."""
    if job.checkpoint.resume == "never":
        return None
    if job.checkpoint.resume != "auto":
        return Path(job.checkpoint.resume)
    own = latest(run / "checkpoints")
    if own is None:
        return None
    if found := _closed("run_dir", str(own), job):
        raise RequestError(tuple(found))
    if found := _unfit("run_dir", open_checkpoint(own, trust(job)), job, plan):
        raise RequestError(tuple(found))
    return own


def step(checkpoint: Path, job: Job) -> int:
    """How many optimizer steps its weights have seen."""
    return int(open_checkpoint(checkpoint, trust(job)).state["step"])


def _unfit(key: str, checkpoint: Checkpoint, job: Job, plan: Plan) -> list[Problem]:
    try:
        match(checkpoint.strategy.only("param", "buffer"), of_plan(plan))
    except ValueError as error:
        return [Problem(key, f"{checkpoint.folder} is of another model: {error}")]
    if wrong := _other_optimizer(job.optim, plan.optimizer, checkpoint):
        which = "optim.name" if plan.optimizer is None else "optim._target_"
        return [Problem(which, f"{wrong}; {RESUME}=never starts anew")]
    done = int(checkpoint.state["step"])
    if done > plan.sizes.steps and any(s.kind == "train" for s in job.steps.values()):
        text = f"{plan.sizes.steps}: {checkpoint.folder} has seen {done} steps already"
        return [Problem("train.steps", text, f"train.steps={done}")]
    return []


def _other_optimizer(optim: Optim, own: Traits | None, checkpoint: Checkpoint) -> str | None:
    """A checkpoint without any optimizer state fits every optimizer. ``own``: what a class of the user's own does."""
    keys = (name.split(".")[1] for name in checkpoint.strategy.only("optim").entries)
    has = {key.split("/")[0] for key in keys if not key.startswith("param_group/")}
    match optim:
        case AdamW():
            needs = may = {"step", "exp_avg", "exp_avg_sq"}
        case Momentum(momentum=momentum) | SGD(momentum=momentum):
            needs = may = {"momentum_buffer"} if momentum else set()
        case _:
            if own is None:
                return None
            needs, may = set(own.first), set(own.keys)
    if not has or needs <= has <= may:
        return None
    keeps = ", ".join(sorted(may)) or "nothing"
    name = optim.target if isinstance(optim, Target) else optim.name
    return f"{name}: it keeps {keeps} for each parameter, {checkpoint.folder} has {', '.join(sorted(has))}"
