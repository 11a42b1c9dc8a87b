"""The path of a request: ``prepare`` checks and plans it, ``run`` acts.

``prepare`` writes nothing, so a refused request leaves no run folder behind. Every other use of a request
follows a part of this path: ``show=plan`` prints what ``prepare`` returns, a sweep checks its cells with it,
and for a run that starts on a cluster ``run`` ends once its folder is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.checkpoint.tensorfile.watched_folder import watched
from launcher.console import say, tell
from launcher.errors import DONE, Problem, RequestError, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.launch import Launch
from launcher.optional import drill_report, layout_search
from launcher.plan.plan import Plan, impossible
from launcher.plan.resolve.encryption import trust
from launcher.plan.show.text import SHORT, short, text
from launcher.plan.show.timeline import text as drawn
from launcher.plan.step_order import Phase, alone
from launcher.plan.values.text import many
from launcher.plan.verbs import saves_on_ranks
from launcher.planner.plan_job import check_without_torch, plan_checked, planning
from launcher.run import (
    execute,
    frozen_request,
    launch,
    memory_check,
    preflight,
    resume,
    stand_in_tokens,
    status_record,
    submit_to_cluster,
    write_layout_files,
)
from launcher.run.resolved_request import Chosen, ResolvedRequest, open_ended, resolve_request, run_location
from launcher.runtime import console_log, log, run_folder
from launcher.runtime.faults import Interrupted, Preempted
from launcher.runtime.processes.fork_server import prepare_server, serving
from launcher.runtime.run_folder import locked
from launcher.runtime.signals import stoppable

if TYPE_CHECKING:
    from launcher.job.compose import Request
    from launcher.run.external_ranks.leader import FollowerRanks

Until = Literal["settings", "plan", "start"]
"""How far a request is prepared.

``settings``: all checks without torch. ``plan``: for a run that is only shown, or that starts elsewhere.
``start``: for a run whose ranks start here, or have been started by an outer launcher.
"""

BEST = Path("plan", "best.yaml")
"""The recipe of the chosen layout, in the folder of a run that searched for one."""


@dataclass(frozen=True)
class Prepared:
    """A request that has passed its checks; nothing has been started or written.

    ``chosen``: the layout, which may come from a search. ``plan``: ``None`` if only settings were checked, or
    if there is nothing to show but ``previews``: what each ``transform`` will read. ``start``: how ranks
    start, if they start here. ``remarks``: lines below a plan that is shown.
    """

    settled: ResolvedRequest
    chosen: Chosen
    plan: Plan | None = None
    start: launch.Start | None = None
    remarks: tuple[str, ...] = ()
    previews: tuple[str, ...] = ()


def prepare(
    request: Request,
    others: FollowerRanks | None,
    until: Until,
    *,
    shown: bool = False,
    measure: bool = False,
) -> Prepared:
    """Checks the settings, the plan and this machine, in this order.

    Args:
        request: The composed request.
        others: The ranks of torchrun or srun, if this process is one of them.
        until: The last thing that is checked.
        shown: The request is only shown and may run on another machine: what is wrong with this one becomes
            a remark, and what earlier starts have done does not matter.
        measure: A search for a layout may measure candidates, if the request says so; that starts ranks.

    Raises:
        RequestError: With all problems of the first check that finds any.
        RunError: If none of the measured layouts could run.
    """
    settled = resolve_request(request, others, shown)
    if until == "settings" and (open_ended(settled.job) or settled.job.show == "search"):
        layout_search.check(settled.job)
        return Prepared(settled, Chosen(settled.job))
    chosen = _choose_layout(settled.job, measure, others)
    settled = replace(settled, job=chosen.job)
    previews = tuple(preflight.previews(settled.job)) if shown else ()
    if previews and alone(settled.job.steps):
        return Prepared(settled, chosen, previews=previews)

    # the settings, together with all other checks that need no torch
    checked = check_without_torch(settled.resolved, [] if shown else preflight.before_plan(settled))
    if until == "settings":
        refuse(impossible(checked.stage_request))
        return Prepared(settled, chosen, previews=previews)

    # the plan, then checkpoints, files of steps and memory against it
    with planning():
        start = _start(settled, checked.stage_request.sizes.grid.size) if until == "start" else None
        plan = plan_checked(checked)
        notes, remarks = preflight.after_plan(settled, plan, shown)
        if start is not None:
            start = memory_check.checked(settled.job, plan, start)
    if shown:
        remarks += [*request.stand_ins, *_shortage(settled.job, plan)]
    plan = replace(plan, notes=(*plan.notes, *settled.notes, *chosen.notes, *notes))
    return Prepared(settled, chosen, plan, start, tuple(remarks), previews)


def run(request: Request, command: Sequence[str], others: FollowerRanks | None = None) -> dict[str, Any]:
    """Prepares a request and carries it out, here or on the cluster that it names.

    Args:
        request: The composed request.
        command: The command that starts this run again; it is kept in the run folder.
        others: The ranks of torchrun or srun, if this process is one of them.

    Returns:
        The results of the steps; none if a cluster carries out the run.

    Raises:
        RequestError: If something is wrong with the request; no rank was started.
        RunError: If the run failed.
        Interrupted: If a signal stopped the run.
    """
    with serving(), stoppable(), _saved(request.job):
        _make_tokens(request, others)
        until = _until(request.job)
        ready = prepare(request, others, until, measure=until == "start")
        with _opened(ready.settled, others) as folder:
            if until == "plan":
                return _submit(ready, command, folder)
            console_log.keep_in(folder)
            with _reopen(ready.settled, folder) as record:
                if remaining := _remaining_phases(ready, record):
                    _carry_out(ready, remaining, record, command=command, others=others)
                return record.results


def run_request(request: Request, words: Sequence[str], others: FollowerRanks | None = None) -> int:
    """Shows or runs a composed request; ``words`` is the command line. Returns the exit code."""
    show = request.job.show
    if show not in (None, "search"):
        say("\n".join((*request.code, *shown_lines(request))))
        return DONE
    if request.code:
        say("\n".join(request.code))
    try:
        if show == "search":
            with stoppable(), serving():
                say("\n".join(layout_search.shown(request.job, others)))
        else:
            log.console()
            run(request, launch.command(words), others)
    except Interrupted as stop:
        tell(str(stop))
        return stop.code
    return DONE


def run_job(job: Job, *, command: Sequence[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plans ``job``, runs its steps and returns their results.

    The job is complete: ``recipe`` only records what it was composed from. Raises ``RequestError`` before
    anything is started or written, ``RunError`` if the run failed, ``Interrupted`` if a signal stopped it.
    Under torchrun or srun only rank 0 calls it; the others call ``follow_rank_0``.
    """
    from launcher.job.compose import Request  # imports Hydra, which joining ranks do not need
    from launcher.job.origins import Origins

    refuse(tuple(_of_command_line(job)))
    request = Request(job, job.model_dump(mode="json", by_alias=True), Origins(), tuple(overrides))
    with console_log.recorded(), _others(job) as others:
        return run(request, command or ["python", *sys.argv], others)


def _of_command_line(job: Job) -> Iterator[Problem]:
    """Yields a problem for each setting of ``job`` that asks the command for something else than one run."""
    if job.show is not None:
        yield Problem("show", f"{job.show}: run_job runs the job; leave it out, or print plan_job(job)")
    if job.sweep.over:
        keys = ", ".join(job.sweep.over)
        yield Problem(
            "sweep.over", f"{keys}: run_job runs one job; call it for each value, or run launcher -m"
        )


def follow_rank_0(timeout_s: Callable[[], float] = lambda: Launch().timeout_s) -> int:
    """Follows rank 0's instructions, on every other rank of torchrun or srun. Returns the exit code.

    ``timeout_s()`` returns how long rank 0 may take to arrive; it is called if that takes long.
    """
    from launcher.run.external_ranks.follower import follow

    return follow(timeout_s)


def rehearse(request: Request, planned: bool = True) -> Plan | None:
    """Raises ``RequestError`` for everything that would refuse a request before it starts or prints.

    Without ``planned`` it checks only what needs no torch. Returns the plan of a run if there is one.
    """
    show = request.job.show
    if show == "config":
        return None
    until: Until = _until(request.job) if show is None else "plan"
    if not planned or show == "search":
        until = "settings"
    with stand_in_tokens.with_stand_ins(request) as supposed:
        ready = prepare(supposed, None, until, shown=show is not None)
    return ready.plan if show is None else None


def shown_lines(request: Request) -> Iterator[str]:
    """Yields the plan or its timeline, and what each transform of an existing checkpoint will read.

    Raises ``RequestError``.
    """
    with stand_in_tokens.with_stand_ins(request) as supposed:
        ready = prepare(supposed, None, "plan", shown=True)
    show, plan = request.job.show, ready.plan
    if show == "timeline":
        if plan is not None:
            yield drawn(plan.estimate.timeline)
        return
    if plan is not None:
        yield text(plan) if show == "plan-full" else short(plan, SHORT - len(ready.remarks))
    yield from ready.remarks
    yield from ready.previews


def freeze(request: Request, words: Sequence[str]) -> tuple[Job, Plan]:
    """Writes the run folder of a run that another process starts, without its batch file.

    Returns the job, which has a ``run_dir``, and the plan. Raises ``RequestError``.
    """
    _make_tokens(request, None)
    ready = prepare(request, None, "plan")
    assert ready.plan is not None
    with _opened(ready.settled, None) as folder, _reopen(ready.settled, folder) as record:
        _describe(ready, launch.command(words), record)
        frozen_request.write(ready.settled.job, ready.plan, folder)
        record.say("submitted")
    return ready.settled.job, ready.plan


def _until(job: Job) -> Until:
    """Returns how far a run is prepared: on a cluster its ranks do not start here."""
    return "start" if submit_to_cluster.key(job) is None else "plan"


@contextmanager
def _saved(job: Job) -> Iterator[None]:
    """Reports a stop as ``Preempted``: even an interrupted phase loses nothing, because it is repeated."""
    try:
        yield
    except Interrupted as stop:
        if job.launch.signal_save and not stop.insisted and not isinstance(stop, Preempted):
            raise Preempted(stop.signum) from stop
        raise


def _others(job: Job) -> AbstractContextManager[FollowerRanks | None]:
    """Returns the other ranks of an outer launcher, released when the block ends."""
    outer = launch.outer_size()
    if outer is None or launch.mode(job, outer) != "external":
        return nullcontext()
    from launcher.run.external_ranks.leader import leading

    return leading()


def _make_tokens(request: Request, others: FollowerRanks | None) -> None:
    """Makes the tokens that a step prepares and the plan reads, after all other checks of the request."""
    if not stand_in_tokens.makers(request.job):
        return
    if (key := submit_to_cluster.key(request.job)) is not None:
        text = "the plan is made here, and reads tokens that a step of the job would make; make them first"
        raise RequestError((Problem(key, text, "launch=auto 'steps=[prepare]'"),))
    with stand_in_tokens.with_stand_ins(request) as supposed:
        ready = prepare(supposed, others, "start")
    if others is not None:
        others.gather(request.job.launch.timeout_s)
    stand_in_tokens.make(request.job, ready.settled.done)


def _choose_layout(job: Job, measure: bool, others: FollowerRanks | None) -> Chosen:
    """Returns the layout that a search finds; that of ``job`` if it leaves nothing open.

    Raises ``RequestError``.
    """
    return layout_search.choose_layout(job, measure, others) if open_ended(job) else Chosen(job)


def _start(settled: ResolvedRequest, size: int) -> launch.Start:
    """Returns how the ``size`` ranks start. Raises ``RequestError``; starts no rank.

    The server that forks them imports while this process plans.
    """
    if launch.mode(settled.job, settled.outer) == "spawn":
        prepare_server()
    start = launch.start(settled.job, settled.outer, size)
    launch.port_is_free(settled.job, start)
    return start


def _shortage(job: Job, plan: Plan) -> list[str]:
    lacking = memory_check.shortage(job, plan)
    return [lacking] if lacking else []


@contextmanager
def _opened(settled: ResolvedRequest, others: FollowerRanks | None) -> Iterator[Path]:
    """The locked run folder, which every rank sees."""
    job = settled.job
    if others is not None:
        others.gather(job.launch.timeout_s)
        key, where = run_location(job)
        others.share(where, key)
    folder = (
        run_folder.make(Path(job.runs), job.name)
        if job.run_dir is None
        else run_folder.reopen(Path(job.run_dir))
    )
    if others is not None:
        others.went_to(folder)
    with locked(folder), watched(folder):
        yield folder


def _reopen(settled: ResolvedRequest, folder: Path) -> closing[status_record.RunStatus]:
    """Returns the status of the run; it continues after the steps that earlier starts have done."""
    return closing(status_record.reopen(folder, settled.overrides, settled.job, settled.config))


def _describe(ready: Prepared, command: Sequence[str], record: status_record.RunStatus) -> None:
    """Writes the files of the run folder that describe the run: plan, request, command, versions."""
    assert ready.plan is not None
    status_record.write_start_files(
        record.run, ready.plan, command, ready.settled.config, anew=not record.steps
    )
    status_record.write_versions(record.run, ready.settled.job, record.before)


def _submit(ready: Prepared, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Hands the run to its cluster. Returns no results: there are none yet."""
    assert ready.plan is not None
    with _reopen(ready.settled, folder) as record:
        _describe(ready, command, record)
        message, more = submit_to_cluster.submit(ready.settled.job, ready.plan, folder)
        record.say("submitted" if more else "written", **more)
    say(f"{short(ready.plan)}\n{message}")
    return {}


def _remaining_phases(ready: Prepared, record: status_record.RunStatus) -> list[Phase]:
    """Returns the phases that earlier starts have not done; says so if there are none."""
    assert ready.plan is not None
    remaining = [phase for phase in ready.plan.phases if not set(phase.steps) <= set(record.steps)]
    if record.before == "running":
        say(f"the previous start of this run was killed: {record.run}")
    for line in record.lost:
        say(line)
    if not remaining:
        if record.before != "done":
            record.say("done")
        for file in write_layout_files.write_lost(ready.settled.job, ready.plan, record.run):
            say(f"{file} no longer exists, so it is written again")
        say(f"already done: {record.run}")
    return remaining


def _carry_out(
    ready: Prepared,
    remaining: Sequence[Phase],
    record: status_record.RunStatus,
    *,
    command: Sequence[str],
    others: FollowerRanks | None,
) -> None:
    """Runs the phases that are ``remaining``, and keeps the status in the run folder up to date."""
    settled, plan, start = ready.settled, ready.plan, ready.start
    assert plan is not None
    assert start is not None
    job, folder = settled.job, record.run

    # the checkpoint to resume from, and lines on the network, which are known once all ranks have connected
    trains = any(saves_on_ranks(job.steps[name]) for phase in remaining for name in phase.steps)
    source = resume.source(job, plan, folder, trains, overrides=settled.overrides)
    start = start if others is None else replace(start, notes=(*start.notes, *others.notes))
    if ready.chosen.notes:
        layout_search.write(folder / BEST, ready.chosen, [*map(str, ready.chosen.notes)])

    run_folder.reserve_status(folder)
    try:
        # the files that describe the run
        if plan.drill is not None:
            drill_report.note_detection(folder, plan.drill, again=True)
        write_layout_files.write(job, plan, folder)
        _describe(ready, command, record)
        record.say("running")
        say("\n".join([short(plan), *start.notes]))

        # the run itself
        with _saved(job):
            execute.run_phases(
                execute.Run(job, plan, folder, start, others, resume=source), remaining, record
            )
        if plan.drill is not None:
            strict = job.deterministic or start.device == "cpu"
            undisturbed = folder / execute.UNDISTURBED
            drill_report.finish(folder, undisturbed, plan.drill, trust(job), say, strict)
    except BaseException as error:
        record.fail(error)
        raise
    _end(record)


def _end(record: status_record.RunStatus) -> None:
    """Says that the run is done, and what has gone wrong without ending it."""
    record.say("done")
    unsaved = record.results.get("unsaved")
    lost = f"; {many(unsaved, 'checkpoint')} could not be written" if unsaved else ""
    skipped = record.results.get("skipped")
    idle = f"; {many(skipped, 'step')} skipped, because fp16 gradients overflowed" if skipped else ""
    say(f"done in {record.seconds} s: {record.run}{lost}{idle}")
