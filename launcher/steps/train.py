"""``train``: ``train.steps`` optimizer steps, going on from where the weights are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from launcher.job.schema.components import Chat, RandomTokens, Target, Text, Tokens
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Train
from launcher.optim.build import scale_lr
from launcher.optim.schedule import factors
from launcher.runtime.training import loop
from launcher.runtime.training.session import Session
from launcher.runtime.training.watched_metrics import Watched


def run_on_ranks(step: Train, session: Session, job: Job) -> str:
    with torch.autograd.set_detect_anomaly(job.debug.anomaly), _traced(session, job.debug.profiler):
        loop.train(session, replace(asked(session, job), until=_until(step, job, session.plan.sizes.steps)))
    return ""


def _until(step: Train, job: Job, total: int) -> int:
    """The optimizer step that this ``train`` goes up to; all of the request share ``total`` evenly."""
    trains = [s for s in job.steps.values() if isinstance(s, Train)]
    which = next(n for n, s in enumerate(trains, 1) if s is step)
    return total * which // len(trains)


def asked(s: Session, job: Job) -> loop.Loop:
    """The whole training of ``job``."""
    total = s.plan.sizes.steps
    factor = factors(job.schedule, total, job.security.allow)
    per_sample, unit = 1, "samples"
    if isinstance(job.data, Text | RandomTokens | Tokens | Chat):
        per_sample, unit = job.data.seq_len, "tokens"

    return loop.Loop(
        until=total,
        lr=lambda step: _rate(s, job, factor(step)),
        clip=job.train.clip_norm,
        log_every=job.train.log_every,
        eval_every=job.train.eval_every,
        eval_batches=job.train.eval_batches,
        save_every=job.checkpoint.every,
        keep=job.checkpoint.keep,
        units=job.train.batch_size * per_sample,
        unit=unit,
        early_stop=_early_stop(job),
        best=_best(job),
    )


def _early_stop(job: Job) -> Watched | None:
    asked = job.train.early_stop
    if asked is None:
        return None
    key = "train.early_stop.metric"
    return Watched(key, asked.metric, asked.goal, min_delta=asked.min_delta, patience=asked.patience)


def _best(job: Job) -> Watched | None:
    asked = job.checkpoint
    return None if asked.best is None else Watched("checkpoint.best", asked.best, asked.best_goal)


def _rate(s: Session, job: Job, share: float) -> float:
    """Sets the rate of each group, and returns that of ``optim.lr``; of a user's class, the first group's."""
    first = scale_lr(s.optimizer, share)
    return first if isinstance(job.optim, Target) else job.optim.lr * share


@contextmanager
def _traced(s: Session, wanted: bool) -> Iterator[None]:
    """``profile/rank<N>.json``, in Chrome's form.

    torch 2.11 and 2.12 warn at any start that events of earlier cycles are lost; there is only one.
    """
    if not wanted:
        yield
        return
    path = s.folder / "profile" / f"rank{s.world.rank}.json"
    path.parent.mkdir(exist_ok=True)
    trace = torch.profiler.profile()
    with ExitStack() as block:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            block.enter_context(trace)
        yield
    trace.export_chrome_trace(str(path))
