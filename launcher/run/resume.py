"""The checkpoint that a run resumes from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan, strategy_to_load
from launcher.checkpoint.layout.strategy import match
from launcher.checkpoint.manifest import NoManifest
from launcher.checkpoint.read import Checkpoint, open_checkpoint
from launcher.checkpoint.store import encrypted, incomplete, latest, passed_over
from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.components import Optim
from launcher.job.schema.job import Job
from launcher.job.schema.optim import (
    SGD,
    Adafactor,
    AdamW,
    Lion,
    Momentum,
    Muon,
    any_momentum,
)
from launcher.job.schema.user_class import Target
from launcher.plan.plan import Plan
from launcher.plan.resolve.checkpoint import AVERAGE
from launcher.plan.resolve.encryption import trust
from launcher.plan.values.note import Note
from launcher.plan.values.optimizer import OptimizerTraits
from launcher.plan.verbs import CHECKPOINT, loads, needs, reads_best, saves_on_ranks, starts, verb
from launcher.run.resume_changes import ACCEPT, changes, sets, unknown
from launcher.runtime.run_folder import running_launcher
from launcher.steps.file_checks import no_manifest

RESUME, ENCRYPT = "checkpoint.resume", "checkpoint.encrypt"


@dataclass(frozen=True)
class ResumeSource:
    """A checkpoint of weights, and the key that names it; ``trains``: training resumes from it."""

    key: str
    path: Path
    trains: bool


def named(job: Job, overrides: Sequence[str] = (), done: Collection[str] = ()) -> list[Problem]:
    """Returns problems of the checkpoints that the request names; needs neither a plan nor torch."""
    problems: list[Problem] = []
    comes = [*_loads(job), *(n for n, step in job.steps.items() if starts(step))]
    if job.checkpoint.resume not in ("auto", "never"):
        problems += _closed(RESUME, Path(job.checkpoint.resume), job)
        if comes:
            text = f"{job.checkpoint.resume}: the step {comes[0]!r} loads the weights from elsewhere"
            problems.append(Problem(RESUME, text))
    for name, path in _loads(job).items():
        problems += _closed(f"steps.{name}.path", Path(path), job)

    # the newest checkpoint in the run's folder
    try:
        own = _own(job)
    except RequestError as error:
        problems += error.problems
    else:
        problems += [] if own is None else _closed("run_dir", own, job)
    return [*problems, *unknown(job), *_in_plain(job, overrides, done)]


def _loads(job: Job) -> dict[str, str]:
    """Returns the path of each ``load``, except those that an earlier ``save`` of this run may write."""
    out: dict[str, str] = {}
    saved = False
    home = Path(job.run_dir) if job.run_dir is not None else Path(job.runs) / job.name
    for name, step in job.steps.items():
        saved |= step.kind == "save"
        path = getattr(step, verb(step).source) if loads(step) else None
        if path is not None and not reads_best(step):
            own = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(home))
            if not (saved and own):
                out[name] = path
    return out


def _closed(key: str, path: Path, job: Job) -> list[Problem]:
    try:
        step = open_checkpoint(path, trust(job)).state.get("step")
    except NoManifest as error:
        problem = no_manifest(key, error)
        text = "" if problem.cure else f"{path}: cannot resume from this checkpoint: "
        return [replace(problem, text=f"{text}{problem.text}")]
    except (ValueError, OSError) as error:
        return [Problem(key, f"{path}: cannot resume from this checkpoint: {error}")]
    if type(step) is not int or step < 0:
        return [Problem(key, f"{path}: cannot resume from this checkpoint: it does not record its step")]
    return []


def own(job: Job, run: Path) -> Path | None:
    """Returns the newest complete checkpoint of ``run``.

    Raises ``RequestError`` if that cannot be determined, or if ``run`` has checkpoints and none is complete.
    """
    try:
        newest = latest(run / "checkpoints", trust(job))
        flaws = incomplete(run / "checkpoints") if newest is None else []
    except (ValueError, OSError) as error:
        text = f"{run}: cannot resume from this run folder: {error}"
        raise RequestError((Problem("run_dir", text),)) from error
    if flaws:
        text = f"{run}: cannot resume from this run folder: {flaws[0]}"
        cure = "restore that folder or move it away; checkpoint.resume=never starts a new training"
        raise RequestError((Problem("run_dir", f"{text}; {cure}"),))
    return newest


def _own(job: Job) -> Path | None:
    """Returns the checkpoint that a run in ``run_dir`` resumes from.

    Returns ``None`` while another launcher runs there. Raises ``RequestError`` as ``own`` does.
    """
    if job.run_dir is None or job.checkpoint.resume != "auto" or _busy(Path(job.run_dir)):
        return None
    return own(job, Path(job.run_dir))


def _busy(run: Path) -> bool:
    try:
        return running_launcher(run, 0) is not None
    except OSError:  # the folder of another user, which is read-only here
        return False


def _in_plain(job: Job, overrides: Sequence[str], done: Collection[str]) -> Iterator[Problem]:
    """Yields problems of a run that would drop encryption."""
    writes = any(verb(s).checkpoints for name, s in job.steps.items() if name not in done)
    if job.checkpoint.encrypt is not None or not writes or ENCRYPT in job.checkpoint.accept_changes:
        return

    # all checkpoints that weights may come from
    paths = [Path(path) for path in _loads(job).values()]
    if job.checkpoint.resume not in ("auto", "never"):
        paths.append(Path(job.checkpoint.resume))
    if job.run_dir is not None:
        paths += sorted((Path(job.run_dir) / "checkpoints").glob("step-*"), reverse=True)
    first = next(((path, place) for path in paths if (place := encrypted(path)) is not None), None)
    if first is None:
        return

    # imports Hydra, which joining ranks do not need
    from launcher.job.overrides import paste, shell

    path, place = first
    accepted = paste(ACCEPT, [*job.checkpoint.accept_changes, ENCRYPT])
    text = f"null: {path} is encrypted, but this run's checkpoints would not be; {accepted} allows that"
    cure = accepted if sets(overrides, ENCRYPT) else shell(f"{ENCRYPT}={place}")
    yield Problem(ENCRYPT, text, cure)


def sources(job: Job, remaining: Collection[str] | None = None) -> list[ResumeSource]:
    """Returns the checkpoints from which this run takes weights.

    ``remaining``: the steps that are yet to run. This is the one that ``checkpoint.resume`` names; otherwise
    the newest one of the run folder, and those of ``load`` steps.
    """
    steps = {name: s for name, s in job.steps.items() if remaining is None or name in remaining}
    trains = any(map(saves_on_ranks, steps.values()))
    if job.checkpoint.resume not in ("auto", "never"):
        return [ResumeSource(RESUME, Path(job.checkpoint.resume), trains)]
    here = _own(job)
    out = [] if here is None else [ResumeSource("run_dir", here, trains)]
    names = [*job.steps]
    for name, path in _loads(job).items():
        later = any(saves_on_ranks(job.steps[n]) for n in names[names.index(name) :])
        out.append(ResumeSource(f"steps.{name}.path", Path(path), later and here is None and name in steps))
    return out


ResumeProblems = tuple[list[Problem], list[Note]]


def resume_problems(
    job: Job, plan: Plan, overrides: Sequence[str] = (), done: Collection[str] = ()
) -> ResumeProblems:
    """Returns refusals and notes about changes since the checkpoints that the request resumes from."""
    problems, notes = _compared(job, plan, sources(job, job.steps.keys() - {*done}), overrides)
    return [*problems, *_other_contents(job, plan, overrides, done)], notes


def _other_contents(
    job: Job, plan: Plan, overrides: Sequence[str], done: Collection[str]
) -> Iterator[Problem]:
    """Yields problems of data whose files have changed since the training that is already done.

    The request is the same as then, so nothing else of the data can differ.
    """
    trained = {name for name, step in job.steps.items() if saves_on_ranks(step)}
    here = _own(job) if trained and trained <= {*done} else None
    if here is not None:
        checkpoint = open_checkpoint(here, trust(job))
        wrong, _ = changes(checkpoint, job, plan, overrides, misfit=False)
        yield from (problem for problem in wrong if problem.key.partition(".")[0] == "data")


def _compared(
    job: Job, plan: Plan, listed: Sequence[ResumeSource], overrides: Sequence[str]
) -> ResumeProblems:
    problems: list[Problem] = []
    notes: list[Note] = []
    for source in listed:
        checkpoint = open_checkpoint(source.path, trust(job))
        more = _unfit(source.key, checkpoint, job, plan)
        problems += more

        # newer checkpoints that are damaged
        if source.key == "run_dir":
            start = f"resumes from {checkpoint.folder.name}"
            notes += [Note(source.key, f"{start}: {why}") for why in passed_over(checkpoint.folder)]

        # settings that differ from those of the training
        if source.trains:
            misfit = any(p.key == source.key for p in more)
            wrong, added = changes(checkpoint, job, plan, overrides, misfit=misfit)
            problems += [p for p in wrong if p.key not in {q.key for q in more}]
            notes += added
    return problems, notes


def shown(job: Job, plan: Plan, overrides: Sequence[str] = ()) -> list[Note]:
    """Like ``resume_problems``, for a plan that may be made elsewhere.

    Checkpoints that do not exist here are checked when the run starts.
    """
    paths = {f"steps.{name}.path": path for name, path in _loads(job).items()}
    if job.checkpoint.resume not in ("auto", "never"):
        paths[RESUME] = job.checkpoint.resume
    late = "is not on this machine; it is checked when the run starts"
    absent = [Note(key, f"{path} {late}") for key, path in paths.items() if not os.path.lexists(path)]

    here = [s for s in sources(job) if os.path.lexists(s.path)]
    closed = [problem for s in here for problem in _closed(s.key, s.path, job)]
    refuse([*unknown(job), *closed, *_in_plain(job, overrides, ())])
    problems, notes = _compared(job, plan, here, overrides)
    refuse(problems)
    return [*absent, *notes]


def source(job: Job, plan: Plan, run: Path, trains: bool, overrides: Sequence[str]) -> Path | None:
    """Returns the checkpoint that the request names, or the newest complete one of ``run``.

    Raises ``RequestError`` if it does not fit.
    """
    if job.checkpoint.resume == "never":
        return None
    if job.checkpoint.resume != "auto":
        return Path(job.checkpoint.resume)
    newest = own(job, run)
    if newest is not None:
        refuse(_closed("run_dir", newest, job))
        refuse(_compared(job, plan, [ResumeSource("run_dir", newest, trains)], overrides)[0])
    return newest


def step(checkpoint: Path, job: Job) -> int:
    """Returns the number of optimizer steps after which ``checkpoint`` was saved."""
    return int(open_checkpoint(checkpoint, trust(job)).state["step"])


def _unfit(key: str, checkpoint: Checkpoint, job: Job, plan: Plan) -> list[Problem]:
    target = strategy_to_load(plan, checkpoint.strategy.named)
    try:
        match(checkpoint.strategy.only("param", "buffer"), target)
    except ValueError as error:
        return [Problem(key, f"{checkpoint.folder} is of another model: {error}")]
    if len(target.entries) < len(strategy_of_plan(plan).entries):  # no optimizer state is resumed
        return []
    if wrong := _other_optimizer(job.optim, plan.observed.optimizer, checkpoint):
        which = "optim.name" if plan.observed.optimizer is None else "optim._target_"
        return [Problem(which, f"{wrong}; {RESUME}=never starts from scratch")]
    if wrong := _other_use(plan, checkpoint):
        return [Problem("optim.groups", f"{wrong}; {RESUME}=never starts from scratch")]
    done = int(checkpoint.state["step"])
    if done > plan.sizes.steps and any(verb(s).trains for s in job.steps.values()):
        text = f"{plan.sizes.steps}: {checkpoint.folder} has already trained {done} steps"
        cure = f"train.steps={done}" + (" train.epochs=null" if job.train.epochs is not None else "")
        return [Problem("train.steps", text, cure)]
    return []


def _other_use(plan: Plan, checkpoint: Checkpoint) -> str | None:
    """Returns the problem of a parameter that Muon has trained and AdamW would train now, or the reverse."""
    keeps = {"muon": "momentum_buffer", "adamw": "exp_avg"}
    for group in plan.param_groups:
        use = dict(group.settings).get("use")
        for other in keeps.keys() - {use} if isinstance(use, str) else ():
            names = [n for n in group.names if f"optim.{keeps[other]}.{n}" in checkpoint.strategy.entries]
            if names:
                theirs = f"{other}'s {keeps[other]}"
                return f"{use} updates {names[0]}, but {checkpoint.folder} has {theirs} for it"
    return None


def _other_optimizer(optim: Optim, own: OptimizerTraits | None, checkpoint: Checkpoint) -> str | None:
    """Returns why the checkpoint's optimizer state does not fit ``optim``; without any state it always fits.

    ``own``: the traits of a user's class.
    """
    keys = (name.split(".")[1] for name in checkpoint.strategy.only("optim").entries)
    has = {key.split("/")[0] for key in keys if not key.startswith("param_group/") and key != AVERAGE}

    # the states of built-in optimizers are known, those of user classes were probed
    match optim:
        case AdamW():
            needs = may = {"step", "exp_avg", "exp_avg_sq"}
        case Lion():
            needs = may = {"exp_avg"}
        case Adafactor():
            needs, may = {"step"}, {"step", "row_var", "col_var", "variance"}
        case Muon():
            needs, may = set(), {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
        case Momentum() | SGD():
            needs = may = {"momentum_buffer"} if any_momentum(optim) else set()
        case _:
            if own is None:
                return None
            needs, may = set(own.first), set(own.keys)

    if not has or needs <= has <= may:
        return None
    keeps = ", ".join(sorted(may)) or "nothing"
    name = optim.target if isinstance(optim, Target) else optim.name
    return (
        f"{name}: it keeps {keeps} for each parameter, but {checkpoint.folder} has {', '.join(sorted(has))}"
    )


def with_last_checkpoint(job: Job) -> tuple[Job, tuple[Note, ...]]:
    """Sets ``src`` of steps that read a checkpoint to the newest of ``run_dir``, unless a step makes one."""
    rows = {name: verb(step) for name, step in job.steps.items()}
    makes = any(row.trains or row.leaves == CHECKPOINT or row.copies for row in rows.values())
    reads = [n for n, row in rows.items() if row.source == "src" and needs(job.steps[n]) == CHECKPOINT]
    if makes or not reads or job.run_dir is None:
        return job, ()
    try:
        last = latest(Path(job.run_dir) / "checkpoints", trust(job))
    except (ValueError, OSError):  # reported where it is read
        last = None
    if last is None:
        return job, ()
    new = {n: job.steps[n].model_copy(update={"src": str(last)}) for n in reads}
    notes = tuple(Note(f"steps.{n}.src", f"null -> {last}: the newest checkpoint of run_dir") for n in reads)
    return job.model_copy(update={"steps": {**job.steps, **new}}), notes
