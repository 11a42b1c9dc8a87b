"""The files that steps name, looked at before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.checkpoint.hf_write import size_in_bytes
from launcher.checkpoint.incoming import form_of
from launcher.checkpoint.names import renamed
from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.tables import from_ours, to_ours
from launcher.errors import Problem, RequestError
from launcher.job.schema import Job
from launcher.job.steps import Export, Import, Inspect, MergeStrategies, Step, Transform, Verify
from launcher.steps.transform import preview

WRITES = ("train", "save", "import", "transform", "export", "merge_strategies")


def named(job: Job) -> list[Problem]:
    """What is wrong with them; sources that a step before may write are left to that step."""
    found: list[Problem] = []
    written = False
    for name, step in job.steps.items():
        for field, look in [*_always(step), *([] if written else _sources(step))]:
            found += _tried(f"steps.{name}", field, look)
        written |= step.kind in WRITES
    return found


def previews(job: Job) -> list[str]:
    """What each transform of a checkpoint that is there will read. Raises ``RequestError``."""
    out, found = [], list[Problem]()
    for name, step in job.steps.items():
        if isinstance(step, Transform) and step.src is not None:
            try:
                out.append(preview(step, Path(step.src)))
            except RequestError as error:
                found += error.problems
            except (ValueError, OSError) as error:
                found.append(Problem(f"steps.{name}.src", str(error)))
    if found:
        raise RequestError(tuple(found))
    return out


Look = tuple[str, Callable[[], object]]
"""The field, and what raises when its value is wrong."""


def _sources(step: Step) -> Iterator[Look]:
    if isinstance(step, Import):
        yield "src", lambda: form_of(Path(step.src))
        if step.strategy is not None:
            yield "strategy", lambda: _file(step.strategy)
    if isinstance(step, Transform | Export | Inspect) and step.src is not None:
        yield "src", lambda: open_checkpoint(Path(str(step.src)))
    if isinstance(step, Verify | MergeStrategies) and step.src is not None:
        yield "src", lambda: _folder(step.src)
    if isinstance(step, Transform) and step.strategy is not None:
        yield "strategy", lambda: _file(step.strategy)


def _always(step: Step) -> Iterator[Look]:
    if isinstance(step, Import):
        yield "names", lambda: renamed((), to_ours(step.names))
    if isinstance(step, Export):
        yield "names", lambda: renamed((), from_ours(step.names))
        yield "max_shard_size", lambda: size_in_bytes(step.max_shard_size)
        for path in step.beside:
            yield "beside", lambda path=path: _file(path)  # type: ignore[misc]


def _tried(step: str, field: str, look: Callable[[], object]) -> list[Problem]:
    try:
        look()
    except (ValueError, OSError) as error:
        return [Problem(f"{step}.{field}", str(error).removeprefix(f"{field}: "))]
    return []


def _file(path: str | None) -> None:
    assert path is not None
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file")


def _folder(path: str | None) -> None:
    assert path is not None
    if not Path(path).is_dir():
        raise ValueError(f"{path}: no such folder")
