"""Every part of the lab, the most valuable first, and what each does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.gpu.lab import Part, PartContext
from benchmarks.gpu.request import COMPILE, FULL, ONE_MICRO, SELECTIVE

Act = Callable[[PartContext], None]

ALL_STEPS = "steps=[train,evaluate,save,export,sample]"
TWO_STAGES = ("recipe=lm_single", "parallel.pipeline.stages=2", "train.steps=3", ALL_STEPS)
TIED = "recipe=lm_tied_pp2_hsdp2"
CERTIFY = "steps=[certify]"
CERTIFIED: dict[str, tuple[str, ...]] = {
    "default": (TIED,),
    "tensor_parallel": ("recipe=lm_tp2",),
    "level3": (TIED, "parallel.hsdp.optimizer_level=level3"),
    "zero_bubble": (TIED, "parallel.pipeline.scheduler=zero_bubble_h1"),
    "interleaved": ("recipe=lm_pp4_interleaved",),
    "device_matrices": ("recipe=lm_recursive",),
}
"""Layouts that are certified on one device: several ranks must train to the same numbers as one process."""


def parts() -> dict[Part, Act]:
    """Return each part with its function.

    Nothing slow is imported here: a part does that in its own process.
    """
    out: dict[Part, Act] = {
        Part("start.default", 120, 5): _default,
        Part("start.one", 120, 2): _one,
        Part("start.several", 150, 2): partial(_several, ranks=2, words=TWO_STAGES),
    }
    for name, words in CERTIFIED.items():
        out[Part(f"certify.{name}", 200, 4)] = partial(_several, ranks=4, words=(*words, CERTIFY))
    out[Part("tests", 180, 5)] = _tests
    out |= {
        Part("train.eager", 60, timed=True): partial(_train, kernels=True),
        Part("train.compile", 90, timed=True): partial(_train, words=(COMPILE,), kernels=True, cache="c"),
        Part("reference.plain", 40, timed=True): partial(_reference, kind="plain"),
        Part("reference.plain_compile", 60, timed=True): partial(_reference, kind="plain_compile"),
        Part("reference.transformers", 40, timed=True): partial(_reference, kind="transformers"),
        Part("train.compile_one_micro", 90, timed=True): partial(_train, words=(COMPILE, ONE_MICRO)),
        Part("train.recompute_full", 45, timed=True): partial(_train, words=(FULL,)),
        Part("train.recompute_selective", 45, timed=True): partial(_train, words=(SELECTIVE,)),
        Part("train.compile_again", 45, timed=True): partial(_train, words=(COMPILE,), cache="c"),
        Part("train.compile_selective", 90, timed=True): partial(_train, words=(COMPILE, SELECTIVE)),
        Part("train.compile_full", 90, timed=True): partial(_train, words=(COMPILE, FULL)),
        Part("train.parity", 60, timed=True): _parity,
        Part("kernels", 60, timed=True): _kernels,
        Part("calibrate", 120, 4, timed=True): _calibrate,
    }  # fmt: skip
    return out


def _default(context: PartContext) -> None:
    from benchmarks.gpu.starts import launched

    launched(context, "train.steps=3")


def _one(context: PartContext) -> None:
    from benchmarks.gpu.starts import on_device

    on_device(context, "recipe=lm_single", "train.steps=3", ALL_STEPS)


def _several(context: PartContext, ranks: int, words: tuple[str, ...]) -> None:
    from benchmarks.gpu.starts import several

    several(context, ranks, *words)


def _tests(context: PartContext) -> None:
    from benchmarks.gpu.starts import tests

    tests(context)


def _train(context: PartContext, words: tuple[str, ...] = (), kernels: bool = False, cache: str = "") -> None:
    from benchmarks.gpu.training import train

    train(context, *words, kernels=kernels, cache=cache)


def _parity(context: PartContext) -> None:
    from benchmarks.gpu.training import parity

    parity(context)


def _reference(context: PartContext, kind: str) -> None:
    from benchmarks.gpu.reference import measure

    measure(context, kind)


def _kernels(context: PartContext) -> None:
    from benchmarks.gpu.kernels import kernels

    kernels(context)


def _calibrate(context: PartContext) -> None:
    from benchmarks.gpu.calibration import calibrate

    calibrate(context)
