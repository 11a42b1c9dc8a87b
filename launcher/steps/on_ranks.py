"""The steps that run on all ranks with the live model, in the order of the request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest_mac import unvouched
from launcher.checkpoint.store import latest
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Broadcast, Evaluate, Load
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.plan.values.text import bytes_text, many
from launcher.runtime.cluster.world import World, deterministic
from launcher.runtime.training import save, state
from launcher.runtime.training.session import Session
from launcher.steps import certify, evaluate, train
from launcher.steps.model import build_session
from launcher.steps.model.shared_construction import Drawings


def work(
    world: World,
    job: Job,
    plan: Plan,
    folder: Path,
    names: tuple[str, ...],
    resume: Path | None,
    before: Path | None,
    copies: Mapping[str, tuple[tuple[Copy, Plan], ...]],
    drawn: Drawings,
) -> dict[str, Any]:
    """Build the model, go on from ``resume`` if given, carry out ``names``. Returns the figures they left.

    ``before`` is the newest checkpoint that ``folder`` had at the start: a restarted attempt goes on from a newer one.
    ``copies``: what each ``certify`` trains, which is done first, while there is no model yet; ``drawn``: of models.
    """
    if job.deterministic:
        deterministic()
    for name in (n for n in names if n in copies):
        verdict = certify.run(world, copies[name], folder, drawn)
        if world.rank == 0:
            world.send({"text": f"{name}: {verdict}"})
    left = tuple(n for n in names if n not in copies)
    return _live(world, job, plan, folder, left, resume, before, drawn) if left else {}


def _live(
    world: World,
    job: Job,
    plan: Plan,
    folder: Path,
    names: tuple[str, ...],
    resume: Path | None,
    before: Path | None,
    drawn: Drawings,
) -> dict[str, Any]:
    live = build_session.build(world, job, plan, folder, drawn=drawn)
    if world.attempt and (newer := latest(folder / "checkpoints", live.trust)) != before:
        resume = newer
    if resume is not None:
        live.results |= state.load(live, resume).get("results", {})
        live.resumed = True
        if world.rank == 0:
            doubt = unvouched(resume, live.trust)
            live.emit({"text": f"going on from {resume.name}, after {live.step} of {plan.sizes.steps} steps{doubt}"})
    live.on_stop = partial(_rescued, live, job, live.step)
    for name in names:
        if resume is None or not isinstance(job.steps[name], Load):  # what was loaded has been trained on since
            _step(live, job, name)
    save.finish(live)
    return {**live.results, **({"unsaved": live.unsaved} if live.unsaved else {})}


def _rescued(live: Session, job: Job, since: int) -> str | None:
    """The checkpoint to go on from; none is written of weights that nothing has trained ``since`` they came."""
    return save.save(live, job.checkpoint.keep).name if live.step > since else None


def _step(live: Session, job: Job, name: str) -> None:
    step = job.steps[name]
    said = ""
    if step.kind == "train":
        train.run(live, job)
    elif isinstance(step, Evaluate):
        evaluate.run(live, step)
    elif isinstance(step, Load):
        said = _load(live, step)
    elif isinstance(step, Broadcast):
        sent = state.broadcast(live)
        said = (
            f"{many(sent.tensors, 'tensor')} from the first rank of each to its replicas in "
            f"{many(sent.collectives, 'collective')}, {bytes_text(sent.nbytes)}; all digests agree"
            if sent.collectives
            else "nobody holds a copy of another's"
        )
    elif step.kind == "sync_shared":
        for tied in live.model.ties:
            tied.sync()
        count = len(live.plan.ties)
        said = (
            f"{count} tied parameter{'s' if count > 1 else ''} made equal on all stages" if count else "nothing is tied"
        )
    else:
        assert step.kind == "save", f"{name} does not run on ranks"
        said = f"checkpoint {save.save(live, job.checkpoint.keep).name}, {live.world.size} ranks"
    if said and live.world.rank == 0:
        live.emit({"text": f"{name}: {said}"})


def _load(live: Session, step: Load) -> str:
    save.finish(live)  # it may be writing what is asked for
    path = Path(step.path) if step.path is not None else latest(live.folder / "checkpoints", live.trust)
    assert path is not None, "the planner wants a save before a load without a path"
    state.load(live, path, broadcast=step.broadcast)
    read, held = (bytes_text(int(live.results[f"load_bytes_{what}"])) for what in ("read", "held"))
    spared = ", the rest broadcast, all digests agree" if step.broadcast else ""
    return f"took {path}, after {live.step} steps; {read} read for {held} held{spared}{unvouched(path, live.trust)}"
