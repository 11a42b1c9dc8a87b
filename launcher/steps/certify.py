"""``certify``: a copy of the run is trained under its layout and in one process; every number must agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from launcher.errors import RunError
from launcher.job.schema import Job
from launcher.parallel.read import dtype_of
from launcher.plan.facts import DTYPE
from launcher.plan.plan import Plan
from launcher.plan.reduced import Copy
from launcher.runtime import loop
from launcher.runtime.session import Session
from launcher.runtime.world import World
from launcher.steps import session
from launcher.steps.certificate import Certificate, Finding, as_json
from launcher.steps.pieces import Piece, Whole, error, gathered, pieces
from launcher.steps.reference import Outcome, Reference

FILE = "certificate.json"


def run(world: World, copy: Copy, plan: Plan, folder: Path) -> str:
    """Write ``certificate.json``; returns the verdict. Raises ``RunError`` on every rank when it does not hold."""
    certificate = examine(world, copy.job, plan, copy.tolerance, folder)
    told: list[Any] = [None]
    if certificate is not None:
        text = as_json(certificate, copy.job, plan, dict(copy.changes), world.device)
        (folder / FILE).write_text(text, encoding="utf-8")
        told = [(certificate.holds, certificate.verdict())]
    dist.broadcast_object_list(told)
    holds, verdict = told[0]
    if not holds:
        raise RunError(f"the certificate {verdict}; all errors are in {folder / FILE}")
    return str(verdict)


def examine(world: World, job: Job, plan: Plan, tolerance: float, folder: Path) -> Certificate | None:
    """Train all steps of ``job`` twice; rank 0 compares and has the result. Leaves random streams as they were."""
    device = torch.device(world.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        live = session.build(world, job, plan, folder)
        undropped(part.module for part in live.model.parts)
        judge = Judge(job, plan, tolerance, device) if world.rank == 0 else None
        start = gathered(plan, pieces(live.model, weights=True))
        if judge and start:
            judge.weights("weights", 0, start, judge.reference.weights())
        for k in range(plan.sizes.steps):
            _step(live, judge, None if k == 0 else job.train.clip_norm)
        _next_batch(live, judge)
    return Certificate(tuple(judge.findings), tolerance) if judge else None


def undropped(modules: Iterable[nn.Module]) -> None:
    """Dropout off: each rank draws its own, so no two layouts drop the same."""
    for m in (m for module in modules for m in module.modules()):
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = 0.0
        elif isinstance(m, nn.MultiheadAttention):
            m.dropout = 0.0


def _step(live: Session, judge: Judge | None, clip: float | None) -> None:
    """One optimizer step of the real loop. The first is not clipped: its gradients are compared as they are."""
    seen: list[Piece] = []
    hook = live.optimizer.register_step_pre_hook(lambda *_: seen.extend(pieces(live.model)))
    scale = live.scaling.factor
    loss, norm = loop.step(live, clip)
    hook.remove()
    live.step += 1
    grads, weights = gathered(live.plan, seen), gathered(live.plan, pieces(live.model, weights=True))
    if judge and grads and weights:
        want = judge.reference.backward(live.step - 1, clip, scale)
        judge.gradients(live.step, loss, norm, grads, want)
        judge.weights("update", live.step, weights, judge.reference.update(grads.tensors))


def _next_batch(live: Session, judge: Judge | None) -> None:
    """Every rank says what it would read next."""
    batch, sizes = live.feed.batch(live.step), live.plan.sizes
    ins = digest(batch.inputs) if batch.inputs else ""
    out = "" if batch.targets is None else digest([batch.targets])
    every: list[Any] | None = [None] * live.world.size if judge else None
    dist.gather_object((live.feed.part, ins, out), every)
    if judge and every:
        xs, y = judge.reference.batch(live.step)
        for rank, (part, got_in, got_out) in enumerate(every):
            mine = slice(part * sizes.local_batch, (part + 1) * sizes.local_batch)
            same = got_in in ("", digest([x[mine] for x in xs])) and got_out in ("", digest([y[mine]]))
            note = "" if same else f"rank {rank} would read others"
            judge.findings.append(Finding(live.step + 1, "samples", f"rank {rank}", 0.0 if same else inf, note))


def digest(tensors: Iterable[Tensor]) -> str:
    """128 bits of the numbers, in order."""
    found = xxhash.xxh3_128()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Judge:
    """Compares what the ranks did with what one process does, and keeps every error."""

    def __init__(self, job: Job, plan: Plan, tolerance: float, device: torch.device) -> None:
        self.reference = Reference(job, plan, device)
        undropped([self.reference.model])
        self.findings: list[Finding] = []
        self._buffers = {p.name for p in plan.params if p.buffer}
        eps = torch.finfo(dtype_of(DTYPE[plan.precision])).eps
        self._floor = eps / tolerance  # times the norm: what is less than one rounding of the norm is no error

    def weights(self, part: str, step: int, got: Whole, want: Mapping[str, Tensor]) -> None:
        self._complain(part, step, [c for c in got.complaints if c.split(":")[0] not in self._buffers])
        for name, w in want.items():
            self._compare(part, step, name, got.tensors.get(name), w, 0.0)

    def gradients(self, step: int, loss: float, norm: float, got: Whole, want: Outcome) -> None:
        self.findings.append(Finding(step, "loss", "", abs(loss - want.loss) / abs(want.loss)))
        self.findings.append(Finding(step, "norm", "", abs(norm - want.norm) / want.norm if want.norm else norm))
        self._complain("gradient", step, [c for c in got.complaints if c.split(":")[0] not in self._buffers])
        self._complain("buffer", step, [c for c in got.complaints if c.split(":")[0] in self._buffers])
        for name in sorted((want.grads.keys() | got.tensors.keys()) - self._buffers):
            g = want.grads.get(name)
            if g is None:  # behind an unused output: nothing in one process, zeros behind a stage boundary
                g = torch.zeros_like(got.tensors[name])
            self._compare("gradient", step, name, got.tensors.get(name), g, want.norm * self._floor)
        for name, b in want.buffers.items():
            self._compare("buffer", step, name, got.tensors.get(name), b, 0.0)

    def _compare(self, part: str, step: int, name: str, got: Tensor | None, want: Tensor, rounding: float) -> None:
        note = "there is none" if got is None else ""
        self.findings.append(Finding(step, part, name, inf if got is None else error(got, want, rounding), note))

    def _complain(self, part: str, step: int, found: list[str]) -> None:
        for text in found:
            name, _, note = text.partition(": ")
            self.findings.append(Finding(step, part, name, inf, note))
