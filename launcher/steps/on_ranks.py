"""Carries out the steps that run on all ranks with the live model, in the order of the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest_mac import unvouched
from launcher.checkpoint.store import latest
from launcher.job.schema.components import HuggingFace
from launcher.job.schema.job import Job
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.plan.verbs import loads
from launcher.runtime.cluster.world import World, deterministic
from launcher.runtime.training import save, state
from launcher.runtime.training.session import Session
from launcher.runtime.training.watched_metrics import forget_absent
from launcher.steps import module
from launcher.steps.model import build_session, folder_weights
from launcher.steps.model.shared_construction import Drawings


@dataclass(frozen=True)
class RankSteps:
    """The steps ``names`` of one phase, and what every rank needs to carry them out.

    ``resume`` is the checkpoint to go on from, if any; ``before`` the newest one that ``folder`` had
    at the start: a restarted attempt goes on from a newer one. ``copies``: what each step that has no
    use for the model of the run trains in its place; those are done first, while there is no model
    yet. ``drawn``: of models.
    """

    job: Job
    plan: Plan
    folder: Path
    names: tuple[str, ...]
    resume: Path | None
    before: Path | None
    copies: Mapping[str, tuple[tuple[Copy, Plan], ...]]
    drawn: Drawings


def work(world: World, todo: RankSteps) -> dict[str, Any]:
    """Build the model, go on from a checkpoint if there is one, carry out the steps.

    Returns the figures they left.
    """
    if todo.job.deterministic:
        deterministic()

    for name in (n for n in todo.names if n in todo.copies):
        step = todo.job.steps[name]
        verdict = module(step).run_copies(step, world, todo.copies[name], todo.folder, todo.drawn)
        if world.rank == 0:
            world.send({"text": f"{name}: {verdict}"})

    left = [n for n in todo.names if n not in todo.copies]
    if not left:
        return {}
    live = _session(world, todo)
    for name in left:
        step = todo.job.steps[name]
        if live.resumed and loads(step):  # what was loaded has been trained on since
            continue
        said = module(step).run_on_ranks(step, live, todo.job)
        if said and world.rank == 0:
            live.emit({"text": f"{name}: {said}"})
    save.finish(live)
    if live.unsaved:
        return {**live.results, "unsaved": live.unsaved}
    return {**live.results}


def _session(world: World, todo: RankSteps) -> Session:
    """The model in training, with the weights to go on from."""
    live = build_session.build(world, todo.job, todo.plan, todo.folder, drawn=todo.drawn)
    resume = todo.resume
    if world.attempt and (newer := latest(todo.folder / "checkpoints", live.trust)) != todo.before:
        resume = newer
    if resume is not None:
        live.results |= state.load(live, resume).get("results", {})
        live.resumed = True
        forget_absent(live)
        if world.rank == 0:
            done, doubt = f"{live.step} of {todo.plan.sizes.steps} steps", unvouched(resume, live.trust)
            live.emit({"text": f"going on from {resume.name}, after {done}{doubt}"})
    elif isinstance(todo.job.model, HuggingFace) and todo.job.model.weights:
        folder_weights.read(live, todo.job.model)
    live.on_stop = partial(_rescued, live, todo.job, live.step)
    return live


def _rescued(live: Session, job: Job, since: int) -> str | None:
    """The checkpoint to go on from; weights that nothing has trained ``since`` they came are not written."""
    return save.save(live, job.checkpoint.keep).name if live.step > since else None
