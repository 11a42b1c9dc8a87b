"""The files that steps name, looked at before anything is started: heads and manifests, no tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from launcher.checkpoint.foreign.hf_write import check_beside, size_in_bytes
from launcher.checkpoint.foreign.read import form_of, outline
from launcher.checkpoint.foreign.rename import renamed
from launcher.checkpoint.foreign.rename_tables import from_ours, to_ours
from launcher.checkpoint.layout.derived import of_plan
from launcher.checkpoint.mindspore.strategy_input import open_strategy
from launcher.checkpoint.read import open_checkpoint
from launcher.errors import Problem, RequestError, said
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Export, Import, Inspect, MergeStrategies, Step, Transform, Verify
from launcher.plan.plan import Plan
from launcher.plan.settings.saving import trust
from launcher.runtime import folder
from launcher.steps import export, import_weights, merge_strategies, transform, verify

Look = tuple[str, Callable[[], object]]
"""The field, and what raises when its value is wrong."""


def named(job: Job, done: Collection[str] = ()) -> list[Problem]:
    """What is wrong with them, without a plan; what a step before may write is left to the step, as are ``done`` ones.

    What files say together is looked at when each of them can be read.
    """
    found: list[Problem] = []
    made: list[Path] = []
    for name, step in job.steps.items():
        if name not in done:
            own = _tried(f"steps.{name}", [*_settings(step), *_places(step, made), *_files(step, job, made)])
            found += own or _tried(f"steps.{name}", _together(step, job, made))
            found += _unwritable(f"steps.{name}", step)
        made += _writes(step, job)
    return found


def unfit(job: Job, plan: Plan, done: Collection[str] = ()) -> list[Problem]:
    """What of them does not fit the model of ``plan``."""
    found: list[Problem] = []
    made: list[Path] = []
    for name, step in job.steps.items():
        if name not in done and isinstance(step, Import) and not _made(step.src, made):
            found += import_weights.misfits(name, step, plan)
        if name not in done and isinstance(step, Export) and step.src is None and not _elsewhere(job):
            model = of_plan(plan)
            found += _tried(f"steps.{name}", [("names", lambda s=step, m=model: export.check_names(s, "the run", m))])  # type: ignore[misc]
        made += _writes(step, job)
    return found + _unlaid(job, plan, done)


def _unlaid(job: Job, plan: Plan, done: Collection[str] = ()) -> list[Problem]:
    """Layouts in words that the run's own checkpoint cannot be given."""
    found: list[Problem] = []
    for name, step in job.steps.items():
        if name not in done and isinstance(step, Transform) and step.src is None and step.strategy is None:
            found += _tried(f"steps.{name}", [("tp", lambda s=step: transform.target(s, of_plan(plan)))])  # type: ignore[misc]
    return found


def brought(job: Job, plan: Plan) -> Iterator[str]:
    """For ``show=plan``: raises ``RequestError`` for what does not fit, says which imports are not here to be seen."""
    steps = {name: step for name, step in job.steps.items() if isinstance(step, Import)}
    absent = {name: step for name, step in steps.items() if not Path(step.src).exists()}
    found = [p for n, step in steps.items() if n not in absent for p in import_weights.misfits(n, step, plan)]
    if found := found + _unlaid(job, plan):
        raise RequestError(tuple(found))
    for name, step in absent.items():
        yield f"steps.{name}.src: {step.src} is not here: whether it fits the model is seen when the run starts"


def previews(job: Job) -> list[str]:
    """What each transform of a checkpoint that is there will read. Raises ``RequestError``."""
    out, found = [], list[Problem]()
    for name, step in job.steps.items():
        if isinstance(step, Transform) and step.src is not None:
            try:
                out.append(transform.preview(step, Path(step.src), trust(job)))
            except RequestError as error:
                found += error.problems
            except (ValueError, OSError) as error:
                found.append(Problem(f"steps.{name}.src", said(error)))
    if found:
        raise RequestError(tuple(found))
    return out


def _settings(step: Step) -> Iterator[Look]:
    if isinstance(step, Import):
        yield "names", lambda: renamed((), to_ours(step.names))
    if isinstance(step, Export):
        yield "names", lambda: renamed((), from_ours(step.names))
        yield "max_shard_size", lambda: size_in_bytes(step.max_shard_size)


def _places(step: Step, made: Collection[Path]) -> Iterator[Look]:
    """Where it writes."""
    if isinstance(step, Transform) and step.dst is not None and not _made(step.dst, made):
        dst = Path(step.dst)
        if step.src is not None:
            yield "dst", lambda: transform.check_place(step, dst)
        else:
            yield "dst", lambda: transform.check_free(step, dst)
    if isinstance(step, Export):
        if not _made(step.path, made):
            yield "path", lambda: export.check_place(step)
        along = [Path(p) for p in step.beside if not _made(p, made)]
        yield "beside", lambda: check_beside(along)


def _files(step: Step, job: Job, made: Collection[Path]) -> Iterator[Look]:
    """What it reads, each by itself."""
    src = getattr(step, "src", None)
    if src is not None and not _made(src, made):
        if isinstance(step, Transform):
            yield "src", lambda: transform.check_source(step, Path(src), trust(job))
        if isinstance(step, Export | Inspect):
            yield "src", lambda: open_checkpoint(Path(src), trust(job))
        if isinstance(step, Verify):
            yield "src", lambda: verify.check(Path(src), trust(job))
        if isinstance(step, MergeStrategies):
            yield "src", lambda: _folder(src)
        if isinstance(step, Import):
            yield "src", lambda: form_of(Path(src))
    if isinstance(step, Transform | Import) and step.strategy is not None and not _made(step.strategy, made):
        yield "strategy", lambda: open_strategy("strategy", step.strategy)
    if isinstance(step, Transform) and step.src_strategy is not None and not _made(step.src_strategy, made):
        yield "src_strategy", lambda: open_strategy("src_strategy", step.src_strategy)


def _together(step: Step, job: Job, made: Collection[Path]) -> Iterator[Look]:
    """What its files say of each other."""
    src = getattr(step, "src", None)
    strategies = (getattr(step, "strategy", None), getattr(step, "src_strategy", None))
    if src is None or _made(src, made) or any(_made(path, made) for path in strategies):
        return
    if isinstance(step, Transform):
        yield "src" if step.strategy is None else "strategy", lambda: transform.check(step, Path(src), trust(job))
    if isinstance(step, Export):
        yield "names", lambda: export.check_names(step, src, open_checkpoint(Path(src), trust(job)).strategy)
        yield "src", lambda: export.check_source(step, Path(src), trust(job))
    if isinstance(step, Import):
        yield "src", lambda: outline(Path(src), None if step.strategy is None else Path(step.strategy))
    if isinstance(step, MergeStrategies):
        dst = merge_strategies.target(step, Path(job.run_dir or job.runs), Path(src))
        yield "src" if step.dst is None else "dst", lambda: merge_strategies.prepared(step, Path(src), dst)


def _tried(step: str, looks: Iterator[Look] | Collection[Look]) -> list[Problem]:
    found: list[Problem] = []
    for field, look_at in looks:
        try:
            look_at()
        except RequestError as error:
            found += error.problems
        except (ValueError, OSError) as error:
            found.append(Problem(f"{step}.{field}", _own(said(error), field)))
    return found


def _own(text: str, field: str) -> str:
    """Without the name that a function has for what the step calls ``field``."""
    for name in (field, "src_strategy", "src_strategy_dirs", "src_strategy_file", "dst_strategy_file"):
        text = text.removeprefix(f"{name}: ")
    return text


def _unwritable(key: str, step: Step) -> Iterator[Problem]:
    if not isinstance(step, Transform | Export | MergeStrategies):
        return
    field = "path" if isinstance(step, Export) else "dst"
    if (path := getattr(step, field)) is not None:
        problem = folder.check_writable(Path(path).parent, f"{key}.{field}", "the folder of this output")
        yield from [problem] if problem else []


def _writes(step: Step, job: Job) -> Iterator[Path]:
    """Where a step leaves files that a later one may be meant to read."""
    if step.kind in ("train", "save", "import", "transform", "export", "merge_strategies"):
        yield Path(job.run_dir) if job.run_dir is not None else Path(job.runs) / job.name
    if isinstance(step, Transform | MergeStrategies) and step.dst is not None:
        yield Path(step.dst)
    if isinstance(step, Export) and step.path is not None:
        yield Path(step.path)


def _made(path: str | None, made: Collection[Path]) -> bool:
    """Whether what is at ``path`` may be there only when the steps before have written theirs."""
    if path is None:
        return False
    here = _real(path)
    return any(here.is_relative_to(_real(p)) or _real(p).is_relative_to(here) for p in made)


def _real(path: str | Path) -> Path:
    """Without links; where they go in circles ``Path.resolve`` would raise."""
    return Path(os.path.realpath(path))


def _elsewhere(job: Job) -> bool:
    """Whether a transform brings another checkpoint than the run's, which an export may then take."""
    return any(isinstance(s, Transform) and s.src is not None for s in job.steps.values())


def _folder(path: str) -> None:
    if not Path(path).is_dir():
        raise ValueError(f"{path}: no such folder")
