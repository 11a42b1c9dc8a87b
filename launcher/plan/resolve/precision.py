"""``train.precision`` and ``train.loss_scale``, and the dtype that gradients are sent in.

The latter follows from ``parallel.gradient_fp32_sync`` and ``parallel.fp32_communication``.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.communication.buckets_and_gathers import Communication
from launcher.plan.sizes import Sizes
from launcher.plan.values.precision import Precision, precision
from launcher.plan.values.setting import ALONE, Outcome, Setting

COMMUNICATION, SYNC = "parallel.fp32_communication", "parallel.gradient_fp32_sync"


def rows(job: Job, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields the settings that are not at their default."""
    dtypes = precision(job)
    if dtypes.mixed:
        why = f"the model runs in {dtypes.compute}"
        weights = "weights" if job.model.lora is None else "weights that learn"
        why += f"; {weights}, gradients, optimizer state and loss stay {dtypes.kept}"
        yield Setting("train.precision", job.train.precision, "applied", why)
    yield from _loss_scale(job, dtypes)
    if job.parallel.fp32_communication:
        yield Setting(COMMUNICATION, "true", *_raised(job, sizes, dtypes, fused))
    if not job.parallel.gradient_fp32_sync:
        yield Setting(SYNC, "false", *_lowered(job, sizes, dtypes, fused))


def _loss_scale(job: Job, dtypes: Precision) -> Iterator[Setting]:
    key = "train.loss_scale"
    if dtypes.scale is not None:
        how = "halved at an overflow, doubled after 2000 steps without one" if dtypes.dynamic else "fixed"
        value = "null" if dtypes.dynamic else f"{dtypes.scale:g}"
        overflow = "skips the step" if dtypes.dynamic else "ends the run"
        yield Setting(key, value, "applied", f"{dtypes.scale:g}, {how}; an overflow {overflow}")
    elif job.train.loss_scale is not None:
        why = f"{job.train.precision} gradients need no scaling"
        yield Setting(key, f"{job.train.loss_scale:g}", "satisfied", why)


def _raised(job: Job, sizes: Sizes, dtypes: Precision, fused: Communication | None) -> Outcome:
    """Returns the outcome of ``fp32_communication``: gradients are to be sent in fp32."""
    if not dtypes.mixed:
        return "satisfied", f"gradients are {job.train.precision} already; they are sent unchanged"
    if sizes.replicas == 1:
        return "satisfied", ALONE
    return "applied", _travel(dtypes, fused)


def _lowered(job: Job, sizes: Sizes, dtypes: Precision, fused: Communication | None) -> Outcome:
    """Returns the outcome of ``gradient_fp32_sync`` off: gradients may be sent in half precision."""
    if not dtypes.mixed:
        return "satisfied", f"gradients are {job.train.precision} already; nothing to lower"
    if sizes.replicas == 1:
        return "satisfied", ALONE
    if dtypes.reduce != dtypes.compute:
        return "satisfied", f"gradients are sent in {dtypes.reduce}, as {COMMUNICATION}=true requests"
    return "applied", _travel(dtypes, fused)


def _travel(dtypes: Precision, fused: Communication | None) -> str:
    """Describes the dtype in which gradients are sent.

    Those that are not summed over data-parallel ranks are sent in the dtype that they are kept in.
    """
    text = f"gradients are sent in {dtypes.reduce}"
    if fused is None or dtypes.reduce == dtypes.kept:
        return text
    others = []
    if fused.tied:
        others.append("of tied parameters over stages")
    if fused.terms:
        others.append("over tp")
    return f"{text}; those {' and '.join(others)} in {dtypes.kept}" if others else text
