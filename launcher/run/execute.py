"""Runs the phases of a plan: on ranks, in one process, or on files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.checkpoint.store import latest, step_folder
from launcher.checkpoint.tensorfile.watched_folder import identity, make_folder, still_there, watched
from launcher.console import discard_output, say
from launcher.job.schema.data import Chat, Text
from launcher.job.schema.job import Job
from launcher.optional import drill_report
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.plan.resolve.encryption import trust
from launcher.plan.step_order import Phase
from launcher.plan.verbs import starts, verb
from launcher.run import resume, status_record
from launcher.run.launch import Start
from launcher.run.page_and_loggers import Viewers, viewers
from launcher.runtime import gc_thresholds
from launcher.runtime.faults import log_file
from launcher.runtime.log import LogFile
from launcher.runtime.signals import check
from launcher.steps import module, on_files, rank_entry_points
from launcher.steps.sent_to_ranks import RankSteps

if TYPE_CHECKING:
    from launcher.run.external_ranks.leader import FollowerRanks
    from launcher.runtime.cluster.world import World
    from launcher.runtime.training.metrics_file import Metrics
    from launcher.runtime.training.progress import SilentProgress

UNDISTURBED = Path("drill", "undisturbed")
"""The folder in the run folder where a drill keeps its training without the fault."""

SAME_WEIGHTS = ("load", "broadcast", "train", "sync_shared", "save")
"""Steps that the weights depend on, and the one that writes them."""

Hear = Callable[[int, object], None]
Work = Callable[["World"], dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """What every phase needs.

    ``others``: the ranks of an outer launcher; ``resume``: the checkpoint to resume from; ``trial``: true if
    the run may fail, because other layouts follow.
    """

    job: Job
    plan: Plan
    folder: Path
    start: Start
    others: FollowerRanks | None
    resume: Path | None
    trial: bool = False


def run_phases(run: Run, remaining: Sequence[Phase], record: status_record.RunStatus) -> None:
    """Runs the phases that are ``remaining``, and records each when it is done.

    Raises ``RunError`` if one fails, ``Interrupted`` if a signal stopped the run.
    """
    from launcher.runtime.training.metrics_file import Metrics, Rows
    from launcher.runtime.training.progress import progress

    if _reads_data(run.job, remaining):
        _prepare(run.job)

    # drop the rows of steps that will be repeated
    first = sys.maxsize
    if any(p.where == "ranks" for p in remaining):
        first = 0 if run.resume is None else resume.step(run.resume, run.job) + 1
    path = run.folder / "metrics.jsonl"
    table = run.folder / "metrics.csv" if run.job.logger.csv else None
    patient = run.job.checkpoint.on_error == "continue"

    with (
        watched(run.folder),
        Metrics(path, first, table, patient) as metrics,
        progress(run.job.logger.progress) as bar,
        viewers(run.folder, run.job, record.overrides, Rows(path)) as shown,
    ):
        began = identity(run.folder)
        hear: Hear = partial(_hear, run.folder, began, bar, metrics, shown)
        if run.plan.drill is not None:
            hear = drill_report.watching(run.folder, run.plan.drill, hear)
        for phase in remaining:
            check()
            results = do(run, phase, record.results, hear)
            still_there(run.folder, began)
            record.add(phase.steps, results)
    if shown.page is not None and (line := shown.page.loss()):
        say(line)


def _reads_data(job: Job, remaining: Sequence[Phase]) -> bool:
    """Returns true if a step opens the request's data; one that trains copies of the run opens its own."""
    names = (name for phase in remaining if phase.where != "files" for name in phase.steps)
    return any(not verb(job.steps[name]).copies for name in names)


def _prepare(job: Job) -> None:
    """Makes once, in this process, the tokens that every rank reads."""
    from launcher.data.prepare import text_cache
    from launcher.data.prepare.progress import ProgressReporter

    with ProgressReporter(job.logger.progress, say) as speed:
        if isinstance(job.data, Chat):
            from launcher.data.chat import tokens

            tokens.make(job.data, say, speed)
        if isinstance(job.data, Text):
            text_cache.make(job.data, say, speed)


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
    still_there(run, began)
    try:
        bar.feed(news)
    except BrokenPipeError:
        discard_output()
    if "text" not in news:
        metrics.write(news)
        shown.feed(news)


def do(run: Run, phase: Phase, results: Mapping[str, Any], hear: Hear) -> dict[str, Any]:
    """Runs ``phase`` and returns its results. ``results``: the results of earlier steps.

    ``hear(rank, news)`` is called with the news of a step while it runs.
    """
    if phase.where == "ranks":
        return _on_ranks(run, _rank_steps(run, phase), hear)
    if phase.where == "alone" and run.start.mode == "spawn":
        return _in_a_process(run, phase, results, hear)
    return on_files.run(
        phase.steps,
        job=run.job,
        plan=run.plan,
        folder=run.folder,
        results=results,
        say=lambda line: hear(0, {"text": line}),
    )


def _on_ranks(run: Run, todo: RankSteps, hear: Hear) -> dict[str, Any]:
    """Runs the steps on every rank: on those of an outer launcher, in this process, or on new ones."""
    if run.start.mode == "external":
        gc_thresholds.as_usual()
        return _tried(run, todo, hear) if run.trial else _external(run, todo, hear)
    if run.start.mode == "inproc":
        gc_thresholds.as_usual()
        return _inproc(run, partial(rank_entry_points.run_rank_steps, todo=todo), hear)

    from launcher.runtime.processes.start_and_restart import run_ranks

    launch = run.job.launch
    done = run_ranks(
        partial(rank_entry_points.run_rank_steps, todo=todo),
        run.plan.sizes.grid.size,
        device=run.start.device,
        backend=run.start.backend,
        timeout_s=launch.timeout_s,
        folder=run.folder,
        max_restarts=launch.max_restarts,
        port=launch.port,
        threads=launch.threads,
        on_message=hear,
        share=partial(rank_entry_points.with_shared_models, todo),
        polls=launch.signal_save,
    )
    return done[0]


def _rank_steps(run: Run, phase: Phase) -> RankSteps:
    """Returns the steps of ``phase`` with all that a rank needs to run them."""
    todo = RankSteps(
        job=run.job,
        plan=run.plan,
        folder=run.folder,
        names=phase.steps,
        resume=_from(run),
        before=latest(run.folder / "checkpoints", trust(run.job)),
        copies=_copies(run, phase),
        trial=run.trial,
    )
    if (
        run.plan.drill is not None
        and not run.trial
        and any(verb(run.job.steps[n]).trains for n in phase.steps)
    ):
        todo = replace(todo, drill=run.plan.drill, undisturbed=_undisturbed(run, todo))
    return todo


def _undisturbed(run: Run, todo: RankSteps) -> RankSteps:
    """Returns the same training without the fault, from where the request starts.

    Its weights are the reference.
    """
    debug = run.job.debug.model_copy(update={"drill": None})
    folder = run.folder / UNDISTURBED
    named = run.job.checkpoint.resume
    begins = None if named in ("auto", "never") else Path(named)
    return replace(
        todo,
        job=run.job.model_copy(update={"debug": debug}),
        folder=folder,
        names=tuple(n for n in todo.names if run.job.steps[n].kind in SAME_WEIGHTS),
        resume=_from(replace(run, resume=begins)),
        before=latest(folder / "checkpoints", trust(run.job)),
        copies={},
    )


def _copies(run: Run, phase: Phase) -> dict[str, tuple[tuple[Copy, Plan], ...]]:
    """Returns the variants that each ``certify`` or ``calibrate`` of the phase trains, in order."""
    steps = {name: run.job.steps[name] for name in phase.steps}
    return {name: module(s).copies(s, run.job, run.plan) for name, s in steps.items() if verb(s).copies}


def _from(run: Run) -> Path | None:
    """Returns the checkpoint that the ranks resume from, if any: ``run.resume``, else the imported one."""
    if run.resume is None and any(map(starts, run.job.steps.values())):
        return step_folder(run.folder / "checkpoints", 0)
    return run.resume


def _external(run: Run, todo: RankSteps, hear: Hear) -> dict[str, Any]:
    from launcher.run.external_ranks.leader import Instruction

    assert run.others is not None
    launch = run.job.launch
    order = Instruction(
        todo,
        folder=run.folder,
        device=run.start.device,
        backend=run.start.backend,
        timeout_s=launch.timeout_s,
        threads=launch.threads,
        polls=launch.signal_save,
    )
    return run.others.work(order, partial(hear, 0))


def _tried(run: Run, todo: RankSteps, hear: Hear) -> dict[str, Any]:
    """Runs a trial in child processes of the ranks of an outer launcher."""
    from launcher.run.external_ranks.trial_layouts import ExternalTrial

    assert run.others is not None
    launch = run.job.launch
    trial = ExternalTrial(
        todo,
        device=run.start.device,
        backend=run.start.backend,
        timeout_s=launch.timeout_s,
        threads=launch.threads,
    )
    return run.others.try_out(trial, partial(hear, 0))


def _inproc(run: Run, work: Work, hear: Hear) -> dict[str, Any]:
    """Runs the only rank in this process, so that breakpoints in the model work."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from launcher.runtime.cluster.world import World, backend_of, connect, no_stop_signal, place
    from launcher.runtime.signals import heard

    # a world of one rank
    launch, start = run.job.launch, run.start
    world = World(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        attempt=0,
        device=place(start.device, 0),
        backend=start.backend or backend_of(start.device),
        send=partial(hear, 0),
    )

    with (
        _logged(log_file(run.folder, 0)),
        heard() if launch.signal_save else nullcontext(no_stop_signal) as stop_signal,
    ):
        try:
            with connect(world, HashStore(), launch.timeout_s, launch.threads, folder=run.folder):
                return work(replace(world, stop_signal=stop_signal))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    make_folder(path.parent)
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _in_a_process(run: Run, phase: Phase, results: Mapping[str, Any], hear: Hear) -> dict[str, Any]:
    """Runs the phase in a child process, whose end frees its memory and torch threads."""
    from launcher.runtime.processes.start_and_restart import run_ranks

    figures = dict(results)
    launch = run.job.launch
    done = run_ranks(
        partial(_alone, names=phase.steps, job=run.job, plan=run.plan, folder=run.folder, results=figures),
        1,
        timeout_s=launch.timeout_s,
        folder=run.folder,
        threads=launch.threads,
        on_message=hear,
        alone=True,
    )
    return done[0]


def _alone(
    world: World, names: tuple[str, ...], job: Job, plan: Plan, folder: Path, results: Mapping[str, Any]
) -> dict[str, Any]:
    def say(line: str) -> None:
        world.send({"text": line})

    return on_files.run(names, job=job, plan=plan, folder=folder, results=results, say=say)
