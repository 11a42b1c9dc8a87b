"""Compares the results of the ranks with those of one plain process, and keeps every error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf, isfinite

import torch
from torch import Tensor

from launcher.data.source import Dataset
from launcher.parallel.deferred_init.plain_build import unlike
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.steps.certification.certificate import Finding
from launcher.steps.certification.gather_full import Whole, error
from launcher.steps.certification.oracle import model as models
from launcher.steps.certification.oracle import start
from launcher.steps.certification.oracle.samples import Narrow, Samples
from launcher.steps.certification.oracle.training import Cut, Outcome, Prepare, Training

ROUNDINGS = 8.0
"""Rounding errors, in units of a usual step's norm, that gradients which cancel may consist of."""


class Judge:
    """Compares each step on rank 0. ``done``: its own count of the optimizer steps so far."""

    def __init__(self, copy: Copy, plan: Plan, data: Dataset, device: torch.device, prepare: Prepare) -> None:
        self.findings: list[Finding] = []
        self.done = 0
        self.job, self.plan, self.tolerance = copy.job, plan, copy.tolerance
        self._data, self._device, self._prepare = data, device, prepare
        self._buffers = {p.name for p in plan.params if p.buffer}
        # relative to the norm: a difference below one rounding of the norm is no error
        self._floor = torch.finfo(models.kept(self.job.train.precision)).eps / copy.tolerance
        self._usual = 0.0
        """The largest norm of a step whose samples were not chosen."""

    def draws(self) -> bool:
        """Whether a forward draws random numbers that must be made equal. Other sources become findings."""
        drawing, foreign = self.training.draws()
        if not foreign:
            self.findings.append(_judged(0, "draws", "", ""))
        for name, stream in foreign.items():
            note = f"{name or 'the model'} draws from {stream}, so that no two trainings can be compared"
            self.findings.append(_judged(0, "draws", name, f"{note}; draw with torch"))
        return drawing

    def scale(self, most: float) -> float:
        """A loss scale at which no gradient of one process overflows."""
        return self.training.scale(most)

    @property
    def agrees(self) -> bool:
        return all(f.error <= self.tolerance for f in self.findings)

    def start(self, got: Whole, others: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        """Compares the weights at step 0 with plain constructions; the reference then uses the layout's.

        ``others``: tensors that no checkpoint contains; ``exact``: those of a plain construction from the
        same random numbers, which the layout's must equal.
        """
        self._complain("weights", 0, list(got.complaints))
        plain = models.state(models.construct(self.job, self.job.seed))
        made = {n: t for n, t in (got.tensors | dict(others)).items() if n in plain}
        precision = self.job.train.precision
        plain = models.kept_as(made, plain, precision)

        def construct(n: int) -> Mapping[str, Tensor]:
            return models.kept_as(
                made, models.state(models.construct(self.job, self.job.seed + n)), precision
            )

        # values that no construction makes, and missing tensors
        found = start.complaints(plain, construct, made)
        for name in {p.name for p in self.plan.params} & plain.keys() - made.keys():
            found.setdefault(name, "there is none")
        exact = models.kept_as(made, exact, precision)
        # gathered 8-bit and unsigned values are wider, without loss
        for name in unlike(((n, t.to(exact[n].dtype)) for n, t in made.items() if n in exact), exact):
            found.setdefault(name, "is not what a plain construction makes of the same draws")
        for name in plain:
            self.findings.append(_judged(0, "weights", name, found.get(name, "")))

        self.training = Training(
            self.job, self._data, self._cut(), made, device=self._device, prepare=self._prepare
        )
        self._ties()

    def _ties(self) -> None:
        """Checks that the reference has the ties of the plan, on its device too."""
        names = models.names(self.training.models[0])
        for p in self.plan.params:
            mine = next((same for same in names if p.name in same), frozenset())
            if len(p.names) > 1 or len(mine) > 1:
                note = "" if mine == {*p.names} else f"it is one tensor as {_listed(mine)} there"
                self.findings.append(_judged(0, "ties", p.name, note))

    def _cut(self) -> Cut:
        sizes, plan = self.plan.sizes, self.plan
        times = plan.loss_repeats * plan.loss_terms
        if not plan.gradients_mean:
            times *= sizes.replicas
        return Cut(sizes.global_batch, sizes.replicas, sizes.micros, sizes.steps, times=times)

    def narrow(self) -> Narrow:
        """Samples for the next step that leave experts idle."""
        return self.training.narrow(self.done)

    def step(
        self, row: Mapping[str, float], grads: Whole, clip: float | None, scale: float, narrow: Narrow | None
    ) -> None:
        """Compares the next step; ``row`` is the loop's report of it. Call ``update`` afterwards."""
        want = self._outcome(clip, scale, narrow)
        self.done += 1
        # if all positions are alike, gradients may consist of rounding errors of a usual step's
        least = 0.0 if narrow is None else ROUNDINGS * self._usual
        found = self._gradients(row, grads, want, least)
        if narrow is None:
            self._usual = max(self._usual, want.norm)
        for name, read in self.training.statistics().items() if narrow is None else ():
            note = "the loss of a rank reads it, and the first rank's alone is kept" if read else ""
            self.findings.append(_judged(self.done, "statistics", name, note))
        self.findings += [*found, _one(self.done, "rate", row.get("lr"), self.training.rate(self.done - 1))]

    def _outcome(self, clip: float | None, scale: float, narrow: Narrow | None) -> Outcome:
        return self.training.backward(self.training.batch(self.done, narrow), clip, scale)

    def failed(self, why: str, scale: float, narrow: Narrow | None) -> bool:
        """Whether the layout is to blame for a next step that was not finite."""
        want = self._outcome(None, scale, narrow)
        fine = isfinite(want.loss) and isfinite(want.norm)
        if fine:
            note = f"{why}; in one process it is {want.loss}"
            self.findings.append(_judged(self.done + 1, "loss", "", note))
        return fine

    def _gradients(
        self, row: Mapping[str, float], got: Whole, want: Outcome, least: float = 0.0
    ) -> list[Finding]:
        """Compares loss, norm and gradients; ``least``: a lower bound of the norm, to judge rounding."""
        step, floor = self.done, max(want.norm, least) * self._floor
        found = [
            _one(step, "loss", row.get("loss"), want.loss * self.plan.loss_terms),
            _one(step, "norm", row.get("grad_norm"), want.norm, rounding=floor if least else 0.0),
            *(self._complaint(step, text) for text in got.complaints),
        ]  # fmt: skip

        # compare each tensor
        tensors = {n: t for n, t in got.tensors.items() if n not in self._buffers}
        for name in sorted(want.grads.keys() | tensors.keys()):
            g = want.grads.get(name)
            if g is None:  # of an unused output: None in one process, zeros behind a stage boundary
                g = torch.zeros_like(tensors[name])
            found.append(_far(step, "gradient", name, tensors.get(name), want=g, rounding=floor))
        for name, b in want.buffers.items():
            found.append(_far(step, "buffer", name, got.tensors.get(name), want=b))
        return found

    def _complaint(self, step: int, text: str) -> Finding:
        name, _, note = text.partition(": ")
        part = "buffer" if name in self._buffers else "gradient"
        return Finding(step, part, name, inf, note=note)

    def update(self, grads: Whole, got: Whole, means: Whole) -> None:
        """Compares the weights after the step that had these gradients, and their moving average."""
        want = self.training.update(self.done - 1, grads.tensors)
        self._weights("update", got, want)
        self._weights("average", means, self.training.average(self.done - 1, want))

    def loaded(self, got: Whole, exported: Mapping[str, Tensor]) -> None:
        """Compares a model loaded from a checkpoint of the current step, and its export."""
        want = self.training.again()
        self._weights("loaded", got, want)
        self._weights("exported", Whole(dict(exported), ()), want)

    def validation(self, loss: float, samples: Callable[[Samples], Samples]) -> None:
        want = self.training.validate(samples) * self.plan.loss_terms
        self.findings.append(_one(self.done, "validation", loss, want))

    def average_validation(self, loss: float, samples: Callable[[Samples], Samples]) -> None:
        want = self.training.validate_average(samples) * self.plan.loss_terms
        self.findings.append(replace(_one(self.done, "validation", loss, want), name="the moving average"))

    def samples(self, rank: int, same: bool) -> None:
        """Whether a rank would read the right samples in the next step."""
        note = "" if same else f"rank {rank} would read others"
        self.findings.append(_judged(self.done + 1, "samples", f"rank {rank}", note))

    def _weights(self, part: str, got: Whole, want: Mapping[str, Tensor]) -> None:
        self._complain(part, self.done, [c for c in got.complaints if c.split(":")[0] in want])
        for name, w in want.items():
            self.findings.append(_far(self.done, part, name, got.tensors.get(name), want=w))

    def _complain(self, part: str, step: int, found: list[str]) -> None:
        for text in found:
            name, _, note = text.partition(": ")
            self.findings.append(Finding(step, part, name, inf, note=note))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _judged(step: int, part: str, name: str, note: str) -> Finding:
    """A finding that is either right or wrong: wrong if there is a ``note``."""
    return Finding(step, part, name, inf if note else 0.0, note=note)


def _far(
    step: int, part: str, name: str, got: Tensor | None, *, want: Tensor, rounding: float = 0.0
) -> Finding:
    if got is None:
        return _judged(step, part, name, "there is none")
    decides = rounding > 0 and bool((want.abs() < rounding).all())
    relative_to = rounding if decides else 0.0
    return Finding(step, part, name, error(got, want, rounding), relative_to=relative_to)


def _one(step: int, part: str, got: float | None, want: float, rounding: float = 0.0) -> Finding:
    if got is None:
        return _judged(step, part, "", "there is none")
    far, size = abs(got - want), max(abs(want), rounding)
    relative_to = rounding if rounding > abs(want) else 0.0
    return Finding(step, part, "", far / size if size else far, relative_to=relative_to)
