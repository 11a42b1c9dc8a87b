"""What becomes of the switches that change no number: who reads, what is written beside the run, what is told."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.cost.fusion import Fused
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.settings import dataset_strategy, local_norm, shared, speed_up
from launcher.plan.settings.setting import Setting


def refused(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """What can be said of them before the model is read."""
    yield from dataset_strategy.check(job, sizes)
    yield from speed_up.refused(job, sizes)
    yield from local_norm.refused(job)


def unshared(job: Job, params: tuple[Placed, ...]) -> Iterator[Problem]:
    """Listed ties that the model does not have, or has and are not listed."""
    if job.parallel.shared != "auto":
        yield from shared.check(job.parallel.shared, params)


def reading_of(job: Job, sizes: Sizes) -> dataset_strategy.Reading:
    """Who reads."""
    return dataset_strategy.reading(job, sizes, speed_up.broadcast_level(job))


def resolve(job: Job, sizes: Sizes, fused: Fused | None = None) -> Iterator[Setting]:
    """Those that are not at their default; ``fused``: as ``settings.resolve`` has it."""
    par = job.parallel
    if par.dataset_strategy != "data_parallel":
        fate = dataset_strategy.fate(reading_of(job, sizes), sizes)
        yield Setting(dataset_strategy.KEY, dataset_strategy.written(par.dataset_strategy), *fate)
    yield from _files(job)
    yield from local_norm.resolve(job, sizes, fused)
    for s in speed_up.switches(job, sizes, fused):
        assert s.status != "rejected", s
        yield Setting(f"{speed_up.KEY}.{s.name}", s.value, s.status, s.why)


def repeats(job: Job, sizes: Sizes, cut: bool) -> int:
    """How often the loss counts: ranks of ``tp`` repeat it, unless its classes are ``cut`` among them."""
    return 1 if job.parallel.loss_repeated_mean or cut else sizes.grid["tp"]


def resolve_loss(job: Job, sizes: Sizes, cut: bool) -> Iterator[Setting]:
    """``loss_repeated_mean: false`` adds up what a mean over the ranks that repeat a loss would make one of."""
    key, n = "parallel.loss_repeated_mean", sizes.grid["tp"]
    if job.parallel.loss_repeated_mean:
        return
    if repeats(job, sizes, cut) > 1:
        why = f"the loss that {n} tensor-parallel ranks repeat counts {n} times: gradients are {n} times as large"
        yield Setting(key, "false", "applied", why)
    elif n > 1:
        yield Setting(
            key, "false", "satisfied", f"{n} tensor-parallel ranks work out one loss together, none repeats it"
        )
    else:
        yield Setting(key, "false", "satisfied", "no rank repeats the loss of another")


def _files(job: Job) -> Iterator[Setting]:
    """Ties, layouts and groups that are compared with what was planned, or written."""
    par = job.parallel
    which = "trainable parameters" if par.param_strategy.only_trainable else "all parameters and buffers"
    if par.shared != "auto":
        groups = ", ".join("=".join(names) for names in par.shared) or "none"
        yield Setting("parallel.shared", groups, "satisfied", "the ties of the model are these")
    if (path := par.param_strategy.save) is not None:
        why = f"layouts of {which} are written before the first step"
        yield Setting("parallel.param_strategy.save", path, "applied", why)
    if (path := par.param_strategy.load) is not None:
        why = f"this plan gives {which} the layouts of the file"
        yield Setting("parallel.param_strategy.load", path, "satisfied", why)
    if (path := par.operator_strategy.save) is not None:
        why = "strategies of the operators that are cut are written before the first step"
        yield Setting("parallel.operator_strategy.save", path, "applied", why)
    if (path := par.operator_strategy.load) is not None:
        why = "operators are cut as the file says, unless parallel.operators names the same module"
        yield Setting("parallel.operator_strategy.load", path, "applied", why)
    if par.group_file is not None:
        why = "which ranks share which group is written before the first step"
        yield Setting("parallel.group_file", par.group_file, "applied", why)
