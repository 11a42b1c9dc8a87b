"""``train``: runs ``train.steps`` optimizer steps from the current weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from launcher.job.schema.data import Chat, RandomTokens, Text, Tokens
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Train
from launcher.job.schema.user_class import Target
from launcher.optim.build import scale_lr
from launcher.optim.schedule import factors
from launcher.plan.resolve import steps
from launcher.runtime.training import loop
from launcher.runtime.training.monitored_metrics import Watched
from launcher.runtime.training.profiler import FOLDER, ProfileWindow
from launcher.runtime.training.replicas import check_replicas
from launcher.runtime.training.save import report_late_state
from launcher.runtime.training.session import Session


def run_on_ranks(step: Train, session: Session, job: Job) -> str:
    session.profile = _profiled(session, job)
    training = replace(
        loop_settings(session, job), until=steps.end_of_train(step, job, session.plan.sizes.steps)
    )
    with torch.autograd.set_detect_anomaly(job.debug.anomaly):
        loop.train(session, training)
    check_replicas(session)
    report_late_state(session)
    return ""


def loop_settings(s: Session, job: Job) -> loop.Loop:
    """Returns the loop settings of the complete training of ``job``."""
    total = s.plan.sizes.steps
    factor = factors(job.schedule, total, job.security.allow)
    per_sample, unit = 1, "samples"
    if isinstance(job.data, Text | RandomTokens | Tokens | Chat):
        per_sample, unit = job.data.seq_len, "tokens"

    return loop.Loop(
        until=total,
        lr=lambda step: _rate(s, job, _factor(s, factor, step)),
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
    settings = job.train.early_stop
    if settings is None:
        return None
    key = "train.early_stop.metric"
    return Watched(
        key, settings.metric, settings.goal, min_delta=settings.min_delta, patience=settings.patience
    )


def _best(job: Job) -> Watched | None:
    settings = job.checkpoint
    return None if settings.best is None else Watched("checkpoint.best", settings.best, settings.best_goal)


def _factor(s: Session, factor: Callable[[int], float], step: int) -> float:
    """Returns the schedule's factor; every rank asks for it."""
    if s.between is None:
        return factor(step)
    with s.between.compared("schedule", everywhere=True):
        return factor(step)


def _rate(s: Session, job: Job, share: float) -> float:
    """Sets the rate of each group; returns the scaled ``optim.lr``, for a user's class the first group's."""
    first = scale_lr(s.optimizer, share)
    return first if isinstance(job.optim, Target) else job.optim.lr * share


def _profiled(s: Session, job: Job) -> ProfileWindow | None:
    """Returns the profile window of this rank, if it is profiled; the first such rank shows its table."""
    settings = job.debug.profiler
    ranks = range(s.world.size) if settings is None or settings.ranks is None else settings.ranks
    if settings is None or s.world.rank not in ranks:
        return None
    shows = s.world.rank == min(ranks)
    return ProfileWindow(
        steps=settings.steps,
        memory=settings.memory,
        folder=s.folder / FOLDER,
        rank=s.world.rank,
        device=torch.device(s.world.device),
        say=(lambda text: s.emit({"text": text})) if shows else None,
    )
