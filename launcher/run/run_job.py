"""One request from its plan to its last step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.console import gone, say, tell
from launcher.data.checks import absent
from launcher.errors import refuse
from launcher.job.schema.job import Job, Launch
from launcher.plan.plan import Asked, Plan, impossible
from launcher.plan.schedule.timeline import text as drawn
from launcher.plan.show import text
from launcher.plan.values.text import many
from launcher.plan.verbs import Phase, alone
from launcher.planner.plan_job import before_torch, plan_job, planning, settled
from launcher.run import execute, launch, layout_files, memory_check, resume, status, step_files
from launcher.runtime import folder, log
from launcher.runtime.faults import Interrupted, Preempted
from launcher.runtime.interrupts import check, stoppable
from launcher.runtime.lock import locked

if TYPE_CHECKING:
    from launcher.job.compose import Request
    from launcher.run.outer_ranks import Others
    from launcher.runtime.training.metrics import Metrics
    from launcher.runtime.training.progress import Off

DONE = 0


def run_request(request: Request, words: Sequence[str], others: Others | None = None) -> int:
    """Carry out a composed request; ``words`` is the command line. Returns the exit code."""
    if request.job.show is not None:
        say("\n".join(shown(request.job, request.overrides)))
        return DONE
    from launcher.job.cures.report import as_yaml

    log.console()
    try:
        _carry_out(request.job, launch.command(words), as_yaml(request.data), request.overrides, others)
    except Interrupted as stop:
        tell(str(stop))
        return stop.code
    return DONE


def shown(job: Job, overrides: Sequence[str] = ()) -> Iterator[str]:
    """The plan or its timeline, and what each transform of a checkpoint that is there will read."""
    transforms = step_files.previews(job)
    if not (transforms and alone(job.steps)):
        plan = plan_job(job)
        with planning():
            since = resume.shown(job, plan, overrides)
            notes = [*step_files.brought(job, plan)]
        plan = replace(plan, notes=(*plan.notes, *since))
        yield drawn(plan.estimate.timeline) if job.show == "timeline" else text(plan)
        yield from notes if job.show == "plan" else ()
        if job.show == "plan" and (short := memory_check.shortage(job, plan)):
            yield short
    if job.show == "plan":
        yield from transforms


def run_job(job: Job, *, command: Sequence[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plan ``job``, run its steps, return their figures.

    Raises ``RequestError`` before anything is started or written, ``RunError`` when it failed, ``Interrupted`` when it
    was told to stop. Under torchrun or srun rank 0 alone calls it; the others call ``join``.
    """
    from launcher.job.cures.report import as_yaml  # imports Hydra, which a rank that joins has no use for

    config = as_yaml(job.model_dump(mode="json", by_alias=True))
    if launch.outer_size() is None or launch.mode(job, launch.outer_size()) != "external":
        return _carry_out(job, command or ["python", *sys.argv], config, overrides, None)
    from launcher.run.outer_ranks import leading

    with leading() as others:
        return _carry_out(job, command or ["python", *sys.argv], config, overrides, others)


def join(timeout_s: Callable[[], float] = lambda: Launch().timeout_s) -> int:
    """What every rank but 0 of torchrun or srun does: as rank 0 says. Returns the exit code.

    ``timeout_s()``: how long rank 0 may take to come; it is asked when that takes long.
    """
    from launcher.run.outer_ranks import follow

    return follow(timeout_s)


def _carry_out(
    job: Job, command: Sequence[str], config: str, overrides: Sequence[str], others: Others | None
) -> dict[str, Any]:
    with stoppable(), _saved(job):
        return _run(job, command, config, overrides, others)


def _run(
    job: Job, command: Sequence[str], config: str, overrides: Sequence[str], others: Others | None
) -> dict[str, Any]:
    outer = launch.outer_size()
    job = launch.at_home(_again(settled(job), config, others), outer)
    anew = job.checkpoint.resume == "never"
    start, plan = preflight(job, overrides, config, outer)
    if others is not None:
        others.gather(job.launch.timeout_s)
        key, where = _home(job)
        others.share(where, key)
    run = folder.make(Path(job.runs), job.name) if job.run_dir is None else folder.reopen(Path(job.run_dir))
    if others is not None:
        others.went_to(run)
    with locked(run):
        said = status.reopen(run, overrides, config, anew=anew)
        left = [p for p in plan.phases if not set(p.steps) <= set(said.steps)]
        if said.before == "running":
            say(f"the start before this one was killed: {run}")
        if not left:
            if said.before != "done":
                said.say("done")
            say(f"already done: {run}")
            return said.results
        trains = any(job.steps[n].kind in ("train", "save") for p in left for n in p.steps)
        this = execute.Run(job, plan, run, start, others, resume.source(job, plan, run, trains, overrides))
        folder.reserve_status(run)
        try:
            layout_files.write(job, plan, run)
            status.write(run, plan, command, config, anew=not said.steps)
            said.say("running")
            say("\n".join([text(plan), *start.notes]))
            with _saved(job):
                _phases(this, left, said)
        except BaseException as error:
            said.fail(error)
            raise
        said.say("done")
        lost = f"; {many(n, 'checkpoint')} could not be written" if (n := said.results.get("unsaved")) else ""
        say(f"done in {said.seconds} s: {run}{lost}")
        return said.results


def preflight(job: Job, overrides: Sequence[str], config: str, outer: int | None) -> tuple[launch.Start, Plan]:
    """How the ranks of ``job`` start, and the plan. Raises ``RequestError``; starts nothing, writes nothing."""
    asked, done = _before_torch(job, overrides, config, outer)
    with planning():
        start = launch.start(job, outer, asked.sizes.grid.size)
        launch.port_is_free(job, start)
        plan = plan_job(job)
        found, notes = resume.looked(job, plan, overrides, done)
        refuse([*found, *step_files.unfit(job, plan, done)])
        start = memory_check.checked(job, plan, start)
    return start, replace(plan, notes=(*plan.notes, *notes))


def _before_torch(job: Job, overrides: Sequence[str], config: str, outer: int | None) -> tuple[Asked, tuple[str, ...]]:
    """What can be worked out without importing torch, and the steps that are done."""
    key, where = _home(job)
    writable = folder.check_writable(where, key)
    if job.run_dir is not None:
        refuse([p for p in [folder.check_entries(where)] if p])
    anew = job.checkpoint.resume == "never"
    done = () if writable else status.done(job.run_dir, overrides, config, anew)
    asked = before_torch(
        job,
        [
            *([writable] if writable else []),
            *launch.refused(job, outer),
            *resume.named(job, overrides, done),
            *step_files.named(job, done),
            *(absent(job.data) if _reads(job) else []),
            *layout_files.unwritable(job),
        ],
    )
    return asked, done


def rehearse(request: Request, planned: bool = True) -> None:
    """All that a request can be refused for before it starts or prints anything. Raises ``RequestError``.

    Not ``planned``: what it can be refused for without importing torch.
    """
    job, outer = request.job, launch.outer_size()
    if job.show == "config":
        return
    if job.show is not None and planned:
        list(shown(job, request.overrides))
    elif job.show is not None:
        if not (step_files.previews(job) and alone(job.steps)):
            refuse(impossible(before_torch(job)))
    else:
        from launcher.job.cures.report import as_yaml

        config = as_yaml(request.data)
        job = launch.at_home(_again(settled(job), config, None), outer)
        if planned:
            preflight(job, request.overrides, config, outer)
        else:
            refuse(impossible(_before_torch(job, request.overrides, config, outer)[0]))


def _home(job: Job) -> tuple[str, Path]:
    """The setting that says where the run goes, and the folder that it names."""
    return ("runs", Path(job.runs)) if job.run_dir is None else ("run_dir", Path(job.run_dir))


def _again(job: Job, config: str, others: Others | None) -> Job:
    """A job that its outer launcher starts again goes on in the folder of its first start, whatever that resumed."""
    run = others.folder() if others is not None else None
    if run is None and job.run_dir is None:
        run = status.begun(Path(job.runs) / job.name, config)
    if run is None:
        return job
    anew = job.checkpoint.resume if resume.own(job, run) is None else "auto"
    checkpoint = job.checkpoint.model_copy(update={"resume": anew})
    return job.model_copy(update={"run_dir": str(run), "checkpoint": checkpoint})


@contextmanager
def _saved(job: Job) -> Iterator[None]:
    """Where a phase is ended at once nothing is lost either: it begins anew, from what those before it have left."""
    try:
        yield
    except Interrupted as stop:
        if job.launch.signal_save and not stop.insisted and not isinstance(stop, Preempted):
            raise Preempted(stop.signum) from stop
        raise


def _reads(job: Job) -> bool:
    """Whether a step opens the data of the request; ``certify`` has a copy of it."""
    return any(step.kind != "certify" for step in job.steps.values())


def _phases(this: execute.Run, left: Sequence[Phase], said: status.Record) -> None:
    """Those that are ``left``, each recorded when it is done."""
    from launcher.runtime.training.metrics import Metrics
    from launcher.runtime.training.progress import progress

    trains = any(p.where == "ranks" for p in left)
    first = 0 if this.resume is None else resume.step(this.resume, this.job) + 1
    table = this.folder / "metrics.csv" if this.job.logger.csv else None
    patient = this.job.checkpoint.on_error == "continue"
    with (
        Metrics(this.folder / "metrics.jsonl", first if trains else sys.maxsize, table, patient) as metrics,
        progress(this.job.logger.progress) as bar,
    ):
        for phase in left:
            check()
            said.add(phase.steps, execute.do(this, phase, said.results, partial(_hear, this.folder, bar, metrics)))


def _hear(run: Path, bar: Off, metrics: Metrics, rank: int, news: object) -> None:
    assert isinstance(news, dict)
    folder.still_there(run)
    try:
        bar.feed(news)
    except BrokenPipeError:
        gone()
    if "text" not in news:
        metrics.write(news)
