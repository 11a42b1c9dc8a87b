"""Requests that make the tokens they train on: ``prepare`` runs before the plan, which reads the tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from launcher.console import say
from launcher.job.schema.data import Paths, Tokens
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Prepare

if TYPE_CHECKING:
    from launcher.job.compose import Request

WINDOWS = 512
"""Samples of the stand-in for tokens that do not exist yet."""


def makers(job: Job) -> dict[str, Prepare]:
    """Returns the steps at the start of the request that write what ``data`` reads."""
    prepare_steps: dict[str, Prepare] = {}
    for name, step in job.steps.items():
        if not isinstance(step, Prepare):
            break
        if any(_below(path, step.dst) for path in _paths(job)):
            prepare_steps[name] = step
    return prepare_steps


@contextmanager
def with_stand_ins(request: Request) -> Iterator[Request]:
    """``request`` with stand-ins for tokens that ``makers`` have not made yet, and with lines that say so."""
    job = request.job
    absent = {
        path: name
        for name, step in makers(job).items()
        for path in _paths(job)
        if _below(path, step.dst) and not _there(path)
    }
    if not absent:
        yield request
        return
    from launcher.data.prepare import prepare as stand_in  # imports tokenizers

    assert isinstance(job.data, Tokens)
    steps, files = makers(job), {}
    with TemporaryDirectory() as folder:
        for n, (path, name) in enumerate(absent.items()):
            there = Path(folder, f"{n}.tokens")
            stand_in.write_placeholder(there, steps[name], WINDOWS * job.data.seq_len + 1)
            files[path] = str(there)
        lines = [_note_text(path, name, stand_in.bound(steps[name]), job) for path, name in absent.items()]
        yield replace(request, job=_reading(job, files), stand_ins=tuple(lines))


def make(job: Job, done: tuple[str, ...]) -> None:
    """Runs ``makers``, except steps that an earlier start has ``done``."""
    from launcher.data.prepare.prepare import prepare
    from launcher.data.prepare.progress import ProgressReporter

    for name, step in makers(job).items():
        if name not in done:
            with ProgressReporter(job.logger.progress, say) as speed:
                prepared = prepare(step, f"steps.{name}", say, speed)
                say(f"{name}: {prepared.text(step.dst)}")


def _paths(job: Job) -> list[str]:
    if not isinstance(job.data, Tokens):
        return []
    named = (job.data.path, *(source.path for source in job.data.sources), job.data.val)
    return [path for paths in named for path in _each(paths)]


def _each(paths: Paths | None) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths or ()


def _below(path: str, dst: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(dst))


def _there(path: str) -> bool:
    """Returns true if the pattern matches a file, or a folder that is not empty."""
    return any(os.listdir(p) if os.path.isdir(p) else [p] for p in glob(path))


def _reading(job: Job, files: dict[str, str]) -> Job:
    """Returns ``job`` with the paths of its tokens replaced as in ``files``."""
    data = job.data
    assert isinstance(data, Tokens)

    def there(paths: Paths | None) -> Paths | None:
        new = tuple(files.get(path, path) for path in _each(paths))
        return new[0] if isinstance(paths, str) else new if paths is not None else None

    sources = tuple(s.model_copy(update={"path": there(s.path)}) for s in data.sources)
    new = {"path": there(data.path), "val": there(data.val), "sources": sources}
    return job.model_copy(update={"data": data.model_copy(update=new)})


def _note_text(path: str, name: str, bound: int, job: Job) -> str:
    """Returns a note on tokens that do not exist yet, and on what is unknown until then."""
    at_most = "at most " if makers(job)[name].tokenizer == "bpe" else ""
    text = f"{path}: steps.{name} has yet to make it; planned with {at_most}{bound} different tokens"
    return f"{text}; the steps of train.epochs are known only then" if job.train.epochs else text
