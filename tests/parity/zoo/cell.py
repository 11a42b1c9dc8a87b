"""One model under one layout: planned, run on real ranks, and compared with the oracle."""

from __future__ import annotations

import logging
import re
import signal
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Fault, RanksFailed
from launcher.runtime.training import loop
from launcher.steps.certification.compare import Piece, full_tensors, pieces
from launcher.steps.model.build_session import build
from tests.parity.zoo import cures, oracle, samples
from tests.parity.zoo.case import Case
from tests.parity.zoo.layouts import CLIP, SAMPLES, STEPS, Layout
from tests.ranks import DRAWN, here

LIMIT_S, COLLECTIVE_S = 240, 120
"""Limits for a rank and for a collective: on a busy machine, a model that compiles takes minutes."""
TOLERANCE = 1e-12
OPTIM = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
}


T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """``text``: the reason of a refusal, or what differs.

    ``kind``: exact, refused, WRONG, CRASH, HANG; BADCURE: its cure is refused too; ILLEGAL: torch also fails.
    """

    kind: str
    text: str = ""

    @property
    def fine(self) -> bool:
        return self.kind in ("exact", "refused")

    @property
    def helps(self) -> bool:
        """Whether every line of a refusal has a way out: a cure to paste, or words after a semicolon."""
        return all("(try: " in line or "; " in line for line in self.text.splitlines())


@dataclass(frozen=True)
class Refused:
    """The problems with which the plan refuses."""

    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Ran:
    """What one rank has: at the start, after each backward with loss and norm, and at the end."""

    start: list[Piece]
    steps: list[tuple[float, float, list[Piece]]]
    end: list[Piece]


def request_of_case(case: Case, layout: Layout) -> dict[str, Any]:
    """The request, as in a file."""
    parallel: dict[str, Any] = dict(layout.parallel)
    config = case.config(layout.virtual)
    parallel["pipeline"] = {
        "stages": layout.stages, "micro_batch_num": layout.micros, "stage_config": config, **layout.pipeline
    }  # fmt: skip
    return {
        "name": "zoo", "model": {"_target_": f"{case.cls.__module__}.{case.name}"},
        "data": {
            "_target_": "tests.parity.zoo.source.Samples", "shapes": [list(s) for s in case.inputs],
            "classes": case.classes, "target": list(case.target), "ignored": case.ignored,
        },
        "optim": OPTIM[case.optim], "schedule": {"name": "constant"},
        "train": {"steps": STEPS, "batch_size": layout.batch, "precision": "fp64", "clip_norm": CLIP},
        "parallel": parallel, "launch": {"nproc": layout.ranks}, "security": {"allow": ["tests"]},
    }  # fmt: skip


def judge(case: Case, layout: Layout) -> Verdict:
    """Never raises: the verdict contains the error. Cures of a refusal are pasted and must not be refused again.

    All that runs the model is in separate processes, so that no run affects the oracle.
    """
    request, said = request_of_case(case, layout), list[str]()
    while True:
        found = _ran(case, _as_cured(layout, request), request)
        if isinstance(found, Verdict):
            break
        said.append("\n".join(map(str, found)))
        cured = cures.pasted(request, found)
        if cured is None:
            return Verdict("refused", said[0])
        if said[-1] in said[:-1]:
            return Verdict("BADCURE", f"the same again after its cure: {said[-1]}")
        request = cured
    if not said:
        return found
    return Verdict("refused", said[0]) if found.fine else replace(found, text=f"as the cure has it: {found.text}")


def _as_cured(layout: Layout, request: dict[str, Any]) -> Layout:
    """The layout after cures: other ranks, stages, micro batches or another batch need another result of the oracle."""
    pipeline, batch = request["parallel"]["pipeline"], request["train"]["batch_size"]
    ranks = request["launch"]["nproc"]
    return replace(layout, ranks=ranks, stages=pipeline["stages"], micros=pipeline["micro_batch_num"], batch=batch)


def _ran(case: Case, layout: Layout, request: dict[str, Any]) -> Verdict | tuple[Problem, ...]:
    """The verdict, or the problems of a refusal."""
    out = _within(partial(_run, layout, request))
    if isinstance(out, Fault):
        return _failed(case, layout, out)
    return out.problems if isinstance(out, Refused) else _compared(case, layout, *out)


def _within(work: Callable[[], T]) -> T | Fault:
    """Run ``work`` in a separate process."""
    try:
        return here(lambda w: work(), 1, alone=True)[0]
    except RanksFailed as error:
        return error.fault


def _run(layout: Layout, request: dict[str, Any]) -> Fault | Refused | tuple[Plan, list[Ran]]:
    """As the command does it: planned in one process, which then initializes the model and forks the ranks."""
    warnings.simplefilter("ignore")
    signal.alarm(3 * LIMIT_S)
    job = Job.model_validate(request)
    try:
        plan = plan_job(job)
    except RequestError as error:
        return Refused(error.problems)
    DRAWN.add(job, plan)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return plan, here(
                lambda w: _rank(w, job, plan, Path(folder)), layout.ranks, timeout_s=COLLECTIVE_S
            )  # fmt: skip
    except RanksFailed as error:
        return error.fault


def _failed(case: Case, layout: Layout, fault: Fault) -> Verdict:
    """If plain torch cannot train the model either, it is a mistake of the zoo."""
    try:
        here(lambda w: _oracle(case, layout, {}), 1, alone=True)
    except RanksFailed as own:
        return Verdict("ILLEGAL", _root(own.fault))
    late = "Timed out" in fault.message or "timeout" in fault.message or fault.type == "SIGALRM"
    return Verdict("HANG" if late else "CRASH", _root(fault))


def _root(fault: Fault) -> str:
    """The first exception of a chain, without those that torch's pipeline adds around it."""
    said = re.search(r"^[\w.]*(Error|Exception|Failure|Exit): .*$", fault.traceback, re.MULTILINE)
    where = re.findall(r'File "[^"]*/(launcher/[^"]+)", line (\d+)', fault.traceback)
    at = f" (at {where[-1][0]}:{where[-1][1]})" if where else ""
    return (said.group(0) if said else f"{fault.type}: {fault.message}") + at


def _rank(world: World, job: Job, plan: Plan, folder: Path) -> Ran:
    """The launcher's own session and step, as ``steps=[train]`` calls them."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it prints schedules
    signal.alarm(LIMIT_S)
    s = build(world, job, plan, folder, drawn=DRAWN)
    start, steps = pieces(s.model, weights=True), []
    for _ in range(STEPS):
        loss, norm = loop.step(s, CLIP)
        s.step += 1
        steps.append((loss, norm, pieces(s.model)))
    return Ran(start, steps, pieces(s.model, weights=True))


def _compared(case: Case, layout: Layout, plan: Plan, ranks: list[Ran]) -> Verdict:
    start = full_tensors(plan, [p for r in ranks for p in r.start])
    ends = full_tensors(plan, [p for r in ranks for p in r.end])
    steps = [full_tensors(plan, [p for r in ranks for p in r.steps[n][2]]) for n in range(STEPS)]
    for full in (start, *steps, ends):
        if full.complaints:
            return Verdict("WRONG", "; ".join(full.complaints))
    names = {n: t for p in plan.params if p.name in start.tensors for n, t in _all(p.names, start.tensors[p.name])}
    try:
        (truth,) = here(lambda w: _oracle(case, layout, names), 1, alone=True)
    except RanksFailed as error:
        return Verdict("ILLEGAL", _root(error.fault))
    if odd := oracle.unlike(names, truth.built):
        return Verdict("WRONG", f"at the start: {'; '.join(odd[:3])}")
    off: dict[str, float] = {}
    for n, (want, got) in enumerate(zip(truth.steps, steps, strict=True), 1):
        loss, norm, _ = ranks[0].steps[n - 1]
        off[f"loss at step {n}"] = abs(loss - want.loss) / abs(want.loss)
        off[f"norm at step {n}"] = abs(norm - want.norm) / max(want.norm, 1e-300)
        off |= _off(plan, got.tensors, want.grads, f"gradient at step {n}", buffers=False)
        off |= _off(plan, got.tensors, want.buffers, f"buffer at step {n}", buffers=True)
    off |= _off(plan, ends.tensors, truth.weights, "weight at the end", buffers=False)
    bound = case.rounds if case.rounds and layout.cuts_operators else TOLERANCE
    wrong = {name: e for name, e in off.items() if not e <= bound}
    if not wrong:
        return Verdict("exact", f"{max(off.values()):.0e}")
    first = [f"{name} by {e:.1e}" for name, e in list(wrong.items())[:4]]
    return Verdict("WRONG", f"{', '.join(first)}; {len(wrong)} of {len(off)} numbers, worst {max(wrong.values()):.1e}")


def _all(names: tuple[str, ...], t: Tensor) -> list[tuple[str, Tensor]]:
    return [(n, t) for n in names]


def _oracle(case: Case, layout: Layout, start: dict[str, Tensor]) -> oracle.Trained:
    warnings.simplefilter("ignore")
    signal.alarm(LIMIT_S)
    terms = oracle.Terms(layout.replicas, layout.micros, layout.batch, STEPS, SAMPLES, case.optim, CLIP)

    def read(indices: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        return samples.inputs(case.inputs, indices), samples.targets(case.target, case.classes, case.ignored, indices)

    return oracle.train(case.cls, start, read, terms)


def _off(plan: Plan, got: dict[str, Tensor], want: dict[str, Tensor], what: str, buffers: bool) -> dict[str, float]:
    """The largest error of each tensor, relative to its largest number or a hundredth of the largest of all."""
    wanted = {p.name: next((want[n] for n in p.names if n in want), None) for p in plan.params if p.buffer is buffers}
    numbers = [_top(t) for t in wanted.values() if t is not None and not buffers]
    floor = max(numbers, default=0.0) * 1e-2
    out = {}
    for name, t in wanted.items():
        mine = got.get(name)
        if mine is None and t is None:
            continue
        if mine is None:
            out[f"{what} of {name} (none)"] = 1.0 if _top(t) else 0.0
        elif t is None:
            out[f"{what} of {name} (should be none)"] = 1.0 if _top(mine) else 0.0
        elif mine.shape != t.shape:
            out[f"{what} of {name} (shape)"] = float("inf")
        else:
            size = max(_top(t), floor)
            difference = _top(mine.to(t.dtype) - t if t.dtype is not torch.bool else mine != t)
            out[f"{what} of {name}"] = difference / size if size else difference and float("inf")
    missing = [n for n in want if not any(n in p.names for p in plan.params)] if not buffers else []
    return out | {f"{what} of {n} (not in the plan)": float("inf") for n in missing}


def _top(t: Tensor | None) -> float:
    return 0.0 if t is None or not t.numel() else float((t.abs() if t.dtype is not torch.bool else t).max())
