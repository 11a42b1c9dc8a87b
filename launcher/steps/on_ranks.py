"""Runs the steps that run on all ranks with the live model, in the order of the request."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest import unvouched
from launcher.checkpoint.store import TRAINING, incomplete, latest, older
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.job.schema.steps import Step
from launcher.optional import drill
from launcher.parallel.fsdp.shard import fill_dispatch_caches
from launcher.plan.verbs import loads, reads_best, verb
from launcher.runtime.cluster.world import World, deterministic
from launcher.runtime.training import checkpoint_tensors, save
from launcher.runtime.training.monitored_metrics import forget_absent
from launcher.runtime.training.session import Session
from launcher.steps import module
from launcher.steps.model import build_session, out_of_memory
from launcher.steps.model.newest_checkpoint import newest_undamaged
from launcher.steps.model.shared_construction import SharedMetaModels
from launcher.steps.sent_to_ranks import RankSteps


def with_shared_models(todo: RankSteps) -> Callable[[World], dict[str, Any]]:
    """Returns the work of every rank; constructs the models once, before the ranks are forked."""
    drawn = SharedMetaModels()
    for name in todo.names:
        step = todo.job.steps[name]
        for copy, plan in todo.copies.get(name, ()):
            drawn.add(copy.job, plan, module(step).BUILDS)
        module(step)  # imported once, for all ranks
    if not todo.copies.keys() >= set(todo.names):
        drawn.add(todo.job, todo.plan)
    if todo.plan.hsdp is not None:
        fill_dispatch_caches()
    return partial(run_rank_steps, todo=todo, drawn=drawn)


def run_rank_steps(world: World, todo: RankSteps, drawn: SharedMetaModels | None = None) -> dict[str, Any]:
    """Runs the steps, and after a drill repeats the training undisturbed. Returns the results of the steps.

    ``drawn``: meta models constructed before the fork; without them each rank constructs its own.
    """
    drawn = drawn or SharedMetaModels()
    figures = _build_and_run_steps(world, todo, drawn)
    if todo.undisturbed is not None:
        if world.rank == 0:
            world.send({"text": "drill: repeating the training without the fault"})
        _build_and_run_steps(replace(world, send=_unheard), todo.undisturbed, drawn)
    return figures


def _unheard(_: object) -> None:
    """Drops what the undisturbed training reports: the run's metrics are those of the drill."""


def _build_and_run_steps(world: World, todo: RankSteps, drawn: SharedMetaModels) -> dict[str, Any]:
    """Builds the model, resumes from a checkpoint if there is one, and runs the steps."""
    if todo.job.deterministic:
        deterministic()

    for name in (n for n in todo.names if n in todo.copies):
        step = todo.job.steps[name]
        with out_of_memory.explained(world, todo.job, plan=None, trial=todo.trial):
            verdict = module(step).run_copies(step, world, todo.copies[name], todo.folder, drawn)
        if world.rank == 0:
            world.send({"text": f"{name}: {verdict}"})

    remaining = [n for n in todo.names if n not in todo.copies]
    if not remaining:
        return {}
    with out_of_memory.explained(world, todo.job, todo.plan, todo.trial):
        live = _session(world, todo, drawn)
        start = live.step
    with out_of_memory.explained(
        world, todo.job, todo.plan, todo.trial, has_optimizer_state=lambda: bool(live.optimizer.state)
    ):
        passed = _passed(live, todo.job) if live.resumed else frozenset()
        for name in remaining:
            step = todo.job.steps[name]
            again = live.resumed and loads(step) and _loaded_before(live, todo.job, name, start)
            if again or name in passed:
                if world.rank == 0 and not verb(step).trains:
                    live.emit({"text": f"{name}: the weights of step {start} come after it"})
                continue
            live.at = name
            message = module(step).run_on_ranks(step, live, todo.job)
            if loads(step):
                live.loaded = {**(live.loaded or {}), name: _source(step)}
            if message and world.rank == 0:
                live.emit({"text": f"{name}: {message}"})
        save.finish(live)
    counts = {"unsaved": live.unsaved, "skipped": live.scaling.skipped}
    return {**live.results, **{name: n for name, n in counts.items() if n}}


def _passed(live: Session, job: Job) -> frozenset[str]:
    """Returns the steps that come before the place in the list at which the run resumes.

    This place is the ``train`` that the checkpoint was saved in, or the last ``load`` that it comes after: a
    ``load`` may lower the number of optimizer steps, so this number does not tell which steps are done. After
    a ``train``, it does: more steps may be requested of it than before.
    """
    names = [*job.steps]
    if live.at not in names:
        return frozenset()
    at = names.index(live.at)
    loaded = live.loaded or {}
    places = [k for k in range(at) if loads(job.steps[names[k]]) and names[k] in loaded]
    if verb(job.steps[live.at]).trains:
        places.append(at)
    return frozenset(names[: max(places, default=0)])


def _loaded_before(live: Session, job: Job, name: str, start: int) -> bool:
    """Returns true if the ``load`` called ``name`` is part of the weights that the run resumed from.

    This is so if a ``train`` follows it, no training of this start came before it, and the checkpoint was
    saved after it. A checkpoint of an older version does not say so: then it must have more steps than the
    training before the load. ``start``: the step of the checkpoint.
    """
    names = [*job.steps]
    before, after = names[: names.index(name)], names[names.index(name) :]
    if live.step != start or not any(verb(job.steps[n]).trains for n in after):
        return False
    if live.loaded is not None:
        return live.loaded.get(name) == _source(job.steps[name])
    trains = [sum(verb(job.steps[n]).trains for n in some) for some in (before, after)]
    return start > live.plan.sizes.steps * trains[0] // sum(trains)


def _source(step: Step) -> str:
    path = getattr(step, verb(step).source)
    return "" if path is None else path if reads_best(step) else os.path.realpath(path)


def _session(world: World, todo: RankSteps, drawn: SharedMetaModels) -> Session:
    """Returns a session, with the weights to start or resume from."""
    live = build_session.build(world, todo.job, todo.plan, todo.folder, drawn=drawn)
    resume = _again(live, todo) if world.attempt else todo.resume
    if todo.drill is not None:
        live.drill = drill.RankDrill(todo.drill, world, todo.folder, live.trust)
    if resume is not None:
        saved = checkpoint_tensors.load(live, resume)
        live.results |= saved.get("results", {})
        live.training = saved.get(TRAINING)
        live.loaded = dict(saved["loaded"]) if isinstance(saved.get("loaded"), dict) else None
        live.at = saved.get("at") if isinstance(saved.get("at"), str) else None
        live.resumed = True
        forget_absent(live)
        if world.rank == 0:
            done, doubt = f"{live.step} of {todo.plan.sizes.steps} steps", unvouched(resume, live.trust)
            live.emit({"text": f"resuming from {resume.name}, after {done}{doubt}"})
    elif isinstance(todo.job.model, HuggingFace) and todo.job.model.weights:
        build_session.load_hf_weights(live, todo.job.model)
    live.on_stop = partial(_rescued, live, todo.job, live.step)
    return live


def _again(live: Session, todo: RankSteps) -> Path | None:
    """Returns the checkpoint that a restarted attempt resumes from: one of this training, else ``resume``.

    If all checkpoints in the folder belong to this training, it is the newest undamaged one. Otherwise only
    the newest checkpoint is considered, if it was saved after the start.
    """
    newest = latest(todo.folder / "checkpoints", live.trust)
    for why in incomplete(todo.folder / "checkpoints", newest) if live.world.rank == 0 else ():
        live.emit({"text": f"a checkpoint is skipped: {why}"})
    own = (
        todo.before is None or todo.resume == todo.before
    )  # the older checkpoints belong to this training too
    if newest is None or (newest == todo.before and not own):
        return todo.resume

    candidates = [newest, *older(newest)] if own else [newest]
    undamaged = newest_undamaged(live.world, candidates, live.trust, lambda text: live.emit({"text": text}))
    if undamaged is None and not own and live.world.rank == 0:
        text = "older checkpoints in the folder may belong to another training"
        start = "training starts again" if todo.resume is None else f"this attempt starts from {todo.resume}"
        live.emit({"text": f"{text}: {start}"})
    return undamaged or todo.resume


def _rescued(live: Session, job: Job, since: int) -> str | None:
    """Saves if steps were trained ``since`` the weights were loaded; returns the checkpoint's name."""
    return save.save(live, job.checkpoint.keep).name if live.step > since else None
