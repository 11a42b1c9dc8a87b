"""Runs one request, from its settings to its last step.

Shows a request: its plan or its timeline, and what is known of its files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.console import gone, say, tell
from launcher.errors import DONE, Problem, RequestError, refuse
from launcher.job.schema.components import Chat, Text
from launcher.job.schema.job import Job, Launch
from launcher.optional import drill_report, layout_search
from launcher.plan.plan import Plan, impossible
from launcher.plan.schedule.timeline import text as drawn
from launcher.plan.settings.checkpoint import trust
from launcher.plan.show import SHORT, short, text
from launcher.plan.step_order import Phase, alone
from launcher.plan.values.text import many
from launcher.plan.verbs import goes_on, verb
from launcher.planner.plan_job import before_torch, plan_checked, plan_job, planning, settled
from launcher.run import (
    execute,
    frozen_request,
    hand_over,
    launch,
    layout_files,
    memory_check,
    preflight,
    resume,
    stand_in_tokens,
    status,
)
from launcher.run.settle import Chosen, Settled, home, open_ended, settle
from launcher.run.viewers import Viewers, viewers
from launcher.runtime import log, run_folder
from launcher.runtime.faults import Interrupted, Preempted
from launcher.runtime.processes.fork_server import serving
from launcher.runtime.run_folder import locked
from launcher.runtime.signals import check, stoppable

if TYPE_CHECKING:
    from launcher.job.compose import Request
    from launcher.run.external_ranks.leader import Others
    from launcher.runtime.processes.fork_server import ForkServer
    from launcher.runtime.training.metrics_file import Metrics
    from launcher.runtime.training.progress import SilentProgress


def plan_lines(job: Job, overrides: Sequence[str] = ()) -> Iterator[str]:
    """The plan or its timeline, and what each transform of an existing checkpoint will read."""
    with stand_in_tokens.supposed(job) as (supposed, pending):
        yield from _plan_lines(supposed, overrides, pending)


def _plan_lines(job: Job, overrides: Sequence[str], pending: Sequence[str]) -> Iterator[str]:
    """The lines of ``shown``; ``pending``: notes on tokens that do not exist yet."""
    job = memory_check.told(job)
    chosen = layout_search.settled(job) if open_ended(job) else Chosen(job)
    job = chosen.job
    transforms = preflight.previews(job)
    if not (transforms and alone(job.steps)):
        plan = plan_job(job)
        with planning():
            since = resume.shown(job, plan, overrides)
            notes = [*preflight.pending(job, plan), *pending]
        plan = replace(plan, notes=(*plan.notes, *chosen.notes, *since))

        if job.show == "timeline":
            yield drawn(plan.estimate.timeline)
        else:
            lacking = memory_check.shortage(job, plan)
            notes += [lacking] if lacking else []
            yield text(plan) if job.show == "plan-full" else short(plan, SHORT - len(notes))
            yield from notes
    if job.show != "timeline":
        yield from transforms


def check_shown(job: Job) -> None:
    """Raises ``RequestError`` if it could not be shown, as far as that is known without torch."""
    with stand_in_tokens.supposed(job) as (supposed, _):
        if open_ended(supposed) or job.show == "search":
            layout_search.check(supposed)
        elif not (preflight.previews(supposed) and alone(job.steps)):
            refuse(impossible(before_torch(settled(memory_check.told(supposed))).asked))


BEST = Path("plan", "best.yaml")
"""The file in the folder of a run whose layout was searched."""


@dataclass(frozen=True)
class RunRequest:
    """A job to run, and its origin: ``command`` as typed, ``config`` the complete request as YAML."""

    job: Job
    command: Sequence[str]
    config: str
    overrides: Sequence[str]


def run_request(request: Request, words: Sequence[str], others: Others | None = None) -> int:
    """Runs a composed request; ``words`` is the command line. Returns the exit code."""
    if request.job.show not in (None, "search"):
        say("\n".join((*request.code, *plan_lines(request.job, request.overrides))))
        return DONE
    if request.code:
        say("\n".join(request.code))
    try:
        if request.job.show == "search":
            with stoppable(), serving():
                say("\n".join(layout_search.shown(request.job, others)))
        else:
            _start(request, words, others)
    except Interrupted as stop:
        tell(str(stop))
        return stop.code
    return DONE


def _start(request: Request, words: Sequence[str], others: Others | None) -> None:
    from launcher.job.cures.report import as_yaml

    log.console()
    _carry_out(
        RunRequest(request.job, launch.command(words), as_yaml(request.data), request.overrides), others
    )


def run_job(job: Job, *, command: Sequence[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plans ``job``, runs its steps and returns their results.

    Raises ``RequestError`` before anything is started or written, ``RunError`` if the run failed,
    ``Interrupted`` if it was told to stop. Under torchrun or srun only rank 0 calls it; the others call
    ``join``.
    """
    from launcher.job.cures.report import as_yaml  # imports Hydra, which joining ranks do not need

    config = as_yaml(job.model_dump(mode="json", by_alias=True))
    request = RunRequest(job, command or ["python", *sys.argv], config, overrides)
    outer = launch.outer_size()
    if outer is None or launch.mode(job, outer) != "external":
        with log.recorded():
            return _carry_out(request, None)
    from launcher.run.external_ranks.leader import leading

    with log.recorded(), leading() as others:
        return _carry_out(request, others)


def join(timeout_s: Callable[[], float] = lambda: Launch().timeout_s) -> int:
    """Follows rank 0's instructions, on every other rank of torchrun or srun. Returns the exit code.

    ``timeout_s()`` returns how long rank 0 may take to arrive; it is called if that takes long.
    """
    from launcher.run.external_ranks.follower import follow

    return follow(timeout_s)


def rehearse(request: Request, planned: bool = True) -> Plan | None:
    """Raises ``RequestError`` for everything that would refuse a request before it starts or prints.

    Without ``planned`` it checks only what needs no torch. Returns the plan if there is one.
    """
    job = request.job
    if job.show == "config":
        return None
    if job.show is not None and planned and job.show != "search":
        list(plan_lines(job, request.overrides))
    elif job.show is not None:
        check_shown(job)
    else:
        from launcher.job.cures.report import as_yaml

        with stand_in_tokens.supposed(job) as (supposed, _):
            asked = settle(supposed, as_yaml(request.data), request.overrides, None)
            if planned and hand_over.key(asked.job) is not None:
                return _plan(*_settled(asked))
            if planned:
                return _decide(*_settled(asked))[1]
            if open_ended(asked.job):
                layout_search.check(asked.job)
            else:
                refuse(impossible(before_torch(asked.resolved, preflight.before_plan(asked)).asked))
    return None


def _carry_out(request: RunRequest, others: Others | None) -> dict[str, Any]:
    """Carries out a request; returns the results of the steps."""
    with serving() as server, stoppable(), _saved(request.job):
        # Resolve the request, check it, and plan it.
        _make_tokens(request, others)
        settled = settle(request.job, request.config, request.overrides, others)
        if hand_over.key(settled.job) is not None:
            return _submit(settled, request)
        asked, chosen = _settled(settled, measure=True, others=others)
        start, plan = _decide(asked, chosen, server)

        with _opened(asked, others) as at:
            log.keep_in(at)
            start = start if others is None else replace(start, notes=(*start.notes, *others.notes))
            # Find the steps that an earlier start has not done.
            record = status.reopen(at, request.overrides, request.config, anew=asked.anew)
            left = [p for p in plan.phases if not set(p.steps) <= set(record.steps)]
            if record.before == "running":
                say(f"the start before this one was killed: {at}")

            if left:
                goes_on_from = _source(asked, plan, at, left)
                run = execute.Run(asked.job, plan, at, start, others=others, resume=goes_on_from)
                if chosen.notes:
                    layout_search.write(at / BEST, chosen, [*map(str, chosen.notes)])
                _run(run, left, record, request)
            else:
                _already_done(record)
            return record.results


def freeze(request: Request, words: Sequence[str]) -> tuple[Job, Plan]:
    """Writes the run folder of a run that another process starts, without its batch file.

    Returns the job, which has a ``run_dir``, and the plan. Raises ``RequestError``.
    """
    from launcher.job.cures.report import as_yaml

    run = RunRequest(request.job, launch.command(words), as_yaml(request.data), request.overrides)
    _make_tokens(run, None)
    with _frozen(settle(run.job, run.config, run.overrides, None), run) as (job, plan, at, record):
        frozen_request.write(job, plan, at)
        record.say("submitted")
    return job, plan


@contextmanager
def _frozen(settled: Settled, request: RunRequest) -> Iterator[tuple[Job, Plan, Path, status.RunStatus]]:
    """Plans a run here that starts elsewhere, in its new run folder."""
    asked, chosen = _settled(settled)
    plan = _plan(asked, chosen)
    with _opened(asked, None) as at:
        record = status.reopen(at, request.overrides, request.config, anew=asked.anew)
        status.write(at, plan, request.command, request.config, anew=not record.steps)
        status.write_versions(at, asked.job, record.before)
        yield asked.job, plan, at, record


def _submit(settled: Settled, request: RunRequest) -> dict[str, Any]:
    """Plans the run and hands it to a cluster."""
    with _frozen(settled, request) as (job, plan, at, record):
        told, more = hand_over.hand_over(job, plan, at)
        record.say("submitted" if more else "written", **more)
    say(f"{short(plan)}\n{told}")
    return {}


def _plan(asked: Settled, chosen: Chosen) -> Plan:
    """The plan of a run that starts elsewhere. Raises ``RequestError``; starts and writes nothing."""
    checked = before_torch(asked.resolved, preflight.before_plan(asked))
    with planning():
        plan = plan_checked(checked)
        found, notes = preflight.after_plan(asked, plan)
        refuse(found)
    return replace(plan, notes=(*plan.notes, *asked.notes, *chosen.notes, *notes))


def _make_tokens(request: RunRequest, others: Others | None) -> None:
    """Makes the tokens that the plan reads and a step makes, after all other checks of the request."""
    if not stand_in_tokens.makers(request.job):
        return
    if (key := hand_over.key(request.job)) is not None:
        text = "the plan is made here, and reads tokens that a step of the job would make; make them first"
        raise RequestError((Problem(key, text, "launch=auto 'steps=[prepare]'"),))
    with stand_in_tokens.supposed(request.job) as (job, _):
        asked = settle(job, request.config, request.overrides, others)
        with serving() as server:
            _decide(*_settled(asked), server)
    if others is not None:
        others.gather(request.job.launch.timeout_s)
    stand_in_tokens.make(request.job, asked.done)


def _settled(asked: Settled, measure: bool = False, others: Others | None = None) -> tuple[Settled, Chosen]:
    """The request with the layout that a search has chosen, and the choice."""
    chosen = Chosen(asked.job)
    if open_ended(asked.job):
        chosen = layout_search.settled(asked.job, measure, others)
    return replace(asked, job=chosen.job), chosen


def _decide(asked: Settled, chosen: Chosen, server: ForkServer | None = None) -> tuple[launch.Start, Plan]:
    """How the ranks start, and the plan. Raises ``RequestError``; starts no rank, writes nothing.

    ``server``: the server that forks ranks of this machine; it imports while this process plans.
    """
    # Check at once everything that needs no torch.
    checked = before_torch(asked.resolved, preflight.before_plan(asked))

    with planning():
        if server is not None and launch.mode(asked.job, asked.outer) == "spawn":
            server.prepare()
        start = launch.start(asked.job, asked.outer, checked.asked.sizes.grid.size)
        launch.port_is_free(asked.job, start)
        plan = plan_checked(checked)

        # Check against the plan: checkpoints, files of steps, the memory of this machine.
        found, notes = preflight.after_plan(asked, plan)
        refuse(found)
        start = memory_check.checked(asked.job, plan, start)
    return start, replace(plan, notes=(*plan.notes, *asked.notes, *chosen.notes, *notes))


@contextmanager
def _opened(asked: Settled, others: Others | None) -> Iterator[Path]:
    """The locked run folder, which every rank sees."""
    job = asked.job
    if others is not None:
        others.gather(job.launch.timeout_s)
        key, where = home(job)
        others.share(where, key)
    at = (
        run_folder.make(Path(job.runs), job.name)
        if job.run_dir is None
        else run_folder.reopen(Path(job.run_dir))
    )
    if others is not None:
        others.went_to(at)
    with locked(at):
        yield at


def _source(asked: Settled, plan: Plan, at: Path, left: Sequence[Phase]) -> Path | None:
    """The checkpoint that the phases ``left`` resume from."""
    trains = any(goes_on(asked.job.steps[n]) for p in left for n in p.steps)
    return resume.source(asked.job, plan, at, trains, overrides=asked.overrides)


def _already_done(record: status.RunStatus) -> None:
    if record.before != "done":
        record.say("done")
    say(f"already done: {record.run}")


def _run(run: execute.Run, left: Sequence[Phase], record: status.RunStatus, request: RunRequest) -> None:
    """Runs the phases that are ``left``, and keeps the status in the run folder up to date."""
    run_folder.reserve_status(run.folder)
    try:
        if run.plan.drill is not None:
            drill_report.look(run.folder, run.plan.drill, again=True)
        layout_files.write(run.job, run.plan, run.folder)
        status.write(run.folder, run.plan, request.command, request.config, anew=not record.steps)
        status.write_versions(run.folder, run.job, record.before)
        record.say("running")
        say("\n".join([short(run.plan), *run.start.notes]))
        with _saved(run.job):
            if _reads_data(run.job, left):
                _prepare(run.job)
            _phases(run, left, record)
        if run.plan.drill is not None:
            strict = run.job.deterministic or run.start.device == "cpu"
            drill_report.finish(
                run.folder, run.folder / execute.UNDISTURBED, run.plan.drill, trust(run.job), say, strict
            )
    except BaseException as error:
        record.fail(error)
        raise

    record.say("done")
    unsaved = record.results.get("unsaved")
    lost = f"; {many(unsaved, 'checkpoint')} could not be written" if unsaved else ""
    skipped = record.results.get("skipped")
    idle = f"; {many(skipped, 'step')} skipped, for fp16 gradients overflowed" if skipped else ""
    say(f"done in {record.seconds} s: {run.folder}{lost}{idle}")


def _reads_data(job: Job, left: Sequence[Phase]) -> bool:
    """Whether a step opens the request's data; a step that trains copies uses its own."""
    names = (name for phase in left if phase.where != "files" for name in phase.steps)
    return any(not verb(job.steps[name]).copies for name in names)


def _prepare(job: Job) -> None:
    """Makes once, in this process, the tokens that every rank reads."""
    from launcher.data.prepare import text_cache
    from launcher.data.prepare.shards import Speed

    with Speed(job.logger.progress, say) as speed:
        if isinstance(job.data, Chat):
            from launcher.data.chat import tokens

            tokens.make(job.data, say, speed)
        if isinstance(job.data, Text):
            text_cache.make(job.data, say, speed)


def _phases(run: execute.Run, left: Sequence[Phase], record: status.RunStatus) -> None:
    """Runs the phases that are ``left``, and records each when it is done."""
    from launcher.runtime.training.metrics_file import Metrics, read
    from launcher.runtime.training.progress import progress

    # drop the rows of steps that will be repeated
    first = sys.maxsize
    if any(p.where == "ranks" for p in left):
        first = 0 if run.resume is None else resume.step(run.resume, run.job) + 1
    path = run.folder / "metrics.jsonl"
    table = run.folder / "metrics.csv" if run.job.logger.csv else None
    patient = run.job.checkpoint.on_error == "continue"

    with (
        Metrics(path, first, table, patient) as metrics,
        progress(run.job.logger.progress) as bar,
        viewers(run.folder, run.job, record.overrides, read(path)) as shown,
    ):
        began = run_folder.identity(run.folder)
        hear: execute.Hear = partial(_hear, run.folder, began, bar, metrics, shown)
        if run.plan.drill is not None:
            hear = drill_report.watching(run.folder, run.plan.drill, hear)
        for phase in left:
            check()
            results = execute.do(run, phase, record.results, hear)
            run_folder.still_there(run.folder, began)
            record.add(phase.steps, results)
    if shown.page is not None and (line := shown.page.loss()):
        say(line)


def _hear(
    run: Path,
    began: tuple[int, int] | None,
    bar: SilentProgress,
    metrics: Metrics,
    shown: Viewers,
    rank: int,
    news: object,
) -> None:
    assert isinstance(news, dict)
    run_folder.still_there(run, began)
    try:
        bar.feed(news)
    except BrokenPipeError:
        gone()
    if "text" not in news:
        metrics.write(news)
        shown.feed(news)


@contextmanager
def _saved(job: Job) -> Iterator[None]:
    """Reports a stop as ``Preempted``: even an interrupted phase loses nothing, because it is repeated."""
    try:
        yield
    except Interrupted as stop:
        if job.launch.signal_save and not stop.insisted and not isinstance(stop, Preempted):
            raise Preempted(stop.signum) from stop
        raise
