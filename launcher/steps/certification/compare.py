"""Compares every number of a layout with that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.data.source import Dataset
from launcher.parallel.deferred_init.compare_builds import unlike
from launcher.parallel.local_tensors import grad, local
from launcher.parallel.parallel_model import ParallelModel
from launcher.plan.certify_copy import Copy
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Box
from launcher.runtime.cluster.messages import gather, gather_tensors
from launcher.steps.certification.certificate import Finding
from launcher.steps.certification.oracle import initial_weights
from launcher.steps.certification.oracle import model as models
from launcher.steps.certification.oracle.samples import Narrow, ReferenceSamples
from launcher.steps.certification.oracle.training import Cut, Prepare, ReferenceResult, ReferenceTraining
from launcher.steps.certification.process_states import ProcessStates

AT_ONCE = 64 << 20
UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


@dataclass(frozen=True)
class Piece:
    """The shard of the tensor ``name`` on ``rank``; a second copy of a tied tensor is a second piece."""

    name: str
    rank: int
    box: Box
    value: Tensor


@dataclass(frozen=True)
class GatheredTensors:
    """Full tensors by first name; ``complaints``: copies that are not bit-equal, and missing elements."""

    tensors: dict[str, Tensor]
    complaints: tuple[str, ...]


def pieces(par: ParallelModel, weights: bool = False) -> list[Piece]:
    """Returns all gradients (or weights) and buffers of this rank, including copies, on the CPU."""
    out = []
    for part in par.parts:
        for p, _, t in part.named(par.plan.params):
            value, box = (local(t) if p.buffer or weights else grad(t)), p.layout.box(par.meshes.rank)
            if value is not None:
                assert box is not None
                out.append(
                    Piece(p.name, par.meshes.rank, box, _portable(value.detach()).to("cpu", copy=True))
                )
    return out


def _portable(t: Tensor) -> Tensor:
    """Widens dtypes that torch cannot compare: 8-bit floats and wide unsigned integers."""
    if t.dtype in UNSIGNED:
        return t.long()
    if t.is_floating_point() and t.itemsize == 1:
        return t.float()
    return t


def full_tensors(plan: Plan, pieces: Sequence[Piece]) -> GatheredTensors:
    """Returns the full tensors made of the ``pieces`` of all ranks; omits tensors without any piece."""
    by_name: dict[str, list[Piece]] = {}
    for f in pieces:
        by_name.setdefault(f.name, []).append(f)
    full, complaints = {}, list[str]()
    for p in plan.params:
        if p.name in by_name:
            full[p.name], wrong = _joined(p, by_name[p.name])
            complaints += wrong
    return GatheredTensors(full, tuple(complaints))


def _joined(p: Placed, pieces: list[Piece]) -> tuple[Tensor, list[str]]:
    full = torch.full(p.spec.shape, -1).to(pieces[0].value.dtype)
    first: dict[Box, Piece] = {}
    wrong = []
    for f in pieces:
        other = first.setdefault(f.box, f)
        if not torch.equal(other.value, f.value):
            wrong.append(f"{p.name}: copies differ on ranks {other.rank} and {f.rank}")
        full[tuple(slice(a, b) for a, b in zip(f.box.lo, f.box.hi, strict=True))] = f.value
    if gaps := [ranks for box, ranks in p.layout.holders().items() if box not in first]:
        wrong.append(f"{p.name}: pieces are missing, first that of rank {gaps[0][0]}")
    return full, wrong


def full_tensors_on_rank_0(plan: Plan, mine: Sequence[Piece]) -> GatheredTensors | None:
    """Returns the full tensors of all ranks' pieces; on other ranks than 0, ``None``. Every rank calls it."""
    full, complaints = dict[str, Tensor](), list[str]()
    for names in _batches(plan):
        every = _gathered([f for f in mine if f.name in names])
        if every is not None:
            got = full_tensors(plan, every)
            full |= got.tensors
            complaints += got.complaints
    return GatheredTensors(full, tuple(complaints)) if dist.get_rank() == 0 else None


def _gathered(mine: Sequence[Piece]) -> list[Piece] | None:
    """Returns, on rank 0, the pieces of all ranks: a collective each sends their labels and their values."""
    labels = gather([(f.name, f.rank, f.box) for f in mine], list[tuple[str, int, Box]])
    values = gather_tensors({str(n): f.value for n, f in enumerate(mine)})
    if labels is None or values is None:
        return None
    pairs = zip(labels, values, strict=True)
    return [
        Piece(name, rank, box, numbers[str(n)])
        for one, numbers in pairs
        for n, (name, rank, box) in enumerate(one)
    ]


def _batches(plan: Plan) -> Iterator[frozenset[str]]:
    """Yields the names of a few tensors at a time, which limits what rank 0 receives at once."""
    names, total = set[str](), 0
    for p in plan.params:
        if names and total + p.spec.nbytes > AT_ONCE:
            yield frozenset(names)
            names, total = set[str](), 0
        names.add(p.name)
        total += p.spec.nbytes
    if names:
        yield frozenset(names)


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def error(a: Tensor, b: Tensor, rounding: float = 0.0) -> float:
    """Returns the largest difference, relative to the largest value of ``b``, or ``rounding`` if larger."""
    a, b = _real(a).double(), _real(b).double()
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    worst = (a - b).abs().max().item()
    size = max(b.abs().max().item(), rounding)
    if size:
        return worst / size
    return 0.0 if worst == 0 else float("inf")


ROUNDINGS = 8.0
"""Gradients that cancel may consist of so many rounding errors of a usual step's norm."""


class Judge:
    """Compares each step on rank 0. ``done``: its own count of the optimizer steps so far."""

    def __init__(self, copy: Copy, plan: Plan, data: Dataset, device: torch.device, prepare: Prepare) -> None:
        self.findings: list[Finding] = []
        self.done = 0
        self.job, self.plan, self.tolerance = copy.job, plan, copy.tolerance
        self._data, self._device, self._prepare = data, device, prepare
        self._buffers = {p.name for p in plan.params if p.buffer}
        # relative to the norm: a difference below one rounding of the norm is not an error
        self._floor = torch.finfo(models.weight_dtype(self.job.train.precision)).eps / copy.tolerance
        self._usual = 0.0
        """The largest norm of a step whose samples were not chosen."""
        self._trained = set[str]()
        """The weights that had a gradient in the last step of one process."""

    def draws(self) -> bool:
        """Returns true if a forward draws random numbers that must be made equal; reports other sources."""
        drawing, foreign = self.training.draws()
        if not foreign:
            self.findings.append(_judged(0, "draws", "", ""))
        for name, stream in foreign.items():
            note = f"{name or 'the model'} draws from {stream}, so two trainings cannot be compared"
            self.findings.append(_judged(0, "draws", name, f"{note}; draw with torch"))
        return drawing

    def scale(self, most: float) -> float:
        """Returns a loss scale at which no gradient of one process overflows."""
        return self.training.scale(most)

    @property
    def agrees(self) -> bool:
        return all(f.error <= self.tolerance for f in self.findings)

    def start(
        self,
        got: GatheredTensors,
        others: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        processes: ProcessStates,
        restart: Callable[[], None],
    ) -> None:
        """Compares the layout's weights at step 0 with plain constructions, then gives them to the reference.

        ``others``: tensors that no checkpoint contains; ``exact``: the tensors of a plain construction from
        the same random numbers, which must be equal. ``processes``: the states that the reference changes.
        ``restart`` sets back what constructors count in Python.
        """

        def construct(seed: int) -> nn.Module:
            restart()
            return models.construct(self.job, seed)

        with processes.process(0, keep=False):
            self._start(got, others, exact, processes, construct)

    def _start(
        self,
        got: GatheredTensors,
        others: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        processes: ProcessStates,
        build: Callable[[int], nn.Module],
    ) -> None:
        self._complain("weights", 0, list(got.complaints))
        plain = models.state(build(self.job.seed))
        made = {n: t for n, t in (got.tensors | dict(others)).items() if n in plain}
        precision = self.job.train.precision
        plain = models.in_dtypes_of_run(made, plain, precision)

        def construct(n: int) -> Mapping[str, Tensor]:
            return models.in_dtypes_of_run(made, models.state(build(self.job.seed + n)), precision)

        # values that no construction makes, and missing tensors
        complaints = initial_weights.complaints(plain, construct, made)
        for name in {p.name for p in self.plan.params} & plain.keys() - made.keys():
            complaints.setdefault(name, "is missing")
        exact = models.in_dtypes_of_run(made, exact, precision)
        # gathered 8-bit and unsigned values are wider, without loss
        for name in unlike(((n, t.to(exact[n].dtype)) for n, t in made.items() if n in exact), exact):
            complaints.setdefault(name, "differs from a plain construction with the same draws")
        for name in plain:
            self.findings.append(_judged(0, "weights", name, complaints.get(name, "")))

        self.training = ReferenceTraining(
            self.job,
            self._data,
            self._cut(),
            made,
            construct=partial(build, self.job.seed),
            device=self._device,
            prepare=self._prepare,
            process=processes.process,
        )
        self._ties()

    def _ties(self) -> None:
        """Checks that the reference has the ties of the plan, on its device too."""
        names = models.names(self.training.models[0])
        for p in self.plan.params:
            mine = next((same for same in names if p.name in same), frozenset())
            if len(p.names) > 1 or len(mine) > 1:
                note = "" if mine == {*p.names} else f"its names in one process are {_listed(mine)}"
                self.findings.append(_judged(0, "ties", p.name, note))

    def _cut(self) -> Cut:
        sizes, plan = self.plan.sizes, self.plan
        times = plan.loss_repeats * plan.loss_terms
        if not plan.gradients_mean:
            times *= sizes.replicas
        return Cut(sizes.global_batch, sizes.replicas, sizes.micros, sizes.steps, times=times)

    def narrow(self) -> Narrow:
        """Returns a batch for the next step that leaves some experts idle."""
        return self.training.narrow(self.done)

    def step(
        self,
        row: Mapping[str, float],
        grads: GatheredTensors,
        clip: float | None,
        scale: float,
        narrow: Narrow | None,
    ) -> None:
        """Compares the next step; ``row`` is the loop's report of it. Call ``update`` afterwards."""
        want = self._outcome(clip, scale, narrow)
        self._trained = {*want.grads}
        self.done += 1
        # if all positions are equal, gradients may be rounding errors of the size of a usual step's
        least = 0.0 if narrow is None else ROUNDINGS * self._usual
        findings = self._gradients(row, grads, want, least)
        if narrow is None:
            self._usual = max(self._usual, want.norm)
        for name, read in self.training.statistics().items() if narrow is None else ():
            note = (
                "the loss of each rank reads its own copy, but only that of the first rank is kept"
                if read
                else ""
            )
            self.findings.append(_judged(self.done, "statistics", name, note))
        self.findings += [
            *findings,
            _one(self.done, "rate", row.get("lr"), self.training.rate(self.done - 1)),
        ]

    def _outcome(self, clip: float | None, scale: float, narrow: Narrow | None) -> ReferenceResult:
        return self.training.backward(self.training.batch(self.done, narrow), clip, scale)

    def failed(self, why: str, scale: float, narrow: Narrow | None) -> bool:
        """Returns true if the next step, not finite in the layout, is finite in one process; records that."""
        want = self._outcome(None, scale, narrow)
        fine = isfinite(want.loss) and isfinite(want.norm)
        if fine:
            note = f"{why}; in one process the loss is {want.loss}"
            self.findings.append(_judged(self.done + 1, "loss", "", note))
        return fine

    def _gradients(
        self, row: Mapping[str, float], got: GatheredTensors, want: ReferenceResult, least: float = 0.0
    ) -> list[Finding]:
        """Compares loss, norm and gradients; ``least``: a lower bound of the norm, to judge rounding."""
        step, floor = self.done, max(want.norm, least) * self._floor
        findings = [
            _one(step, "loss", row.get("loss"), want.loss * self.plan.loss_terms),
            _one(step, "norm", row.get("grad_norm"), want.norm, rounding=floor if least else 0.0),
            *(self._complaint(step, text) for text in got.complaints),
        ]  # fmt: skip

        # compare each tensor
        tensors = {n: t for n, t in got.tensors.items() if n not in self._buffers}
        for name in sorted(want.grads.keys() | tensors.keys()):
            g = want.grads.get(name)
            if g is None:  # whether zeros train the weight shows after the update
                g = torch.zeros_like(tensors[name])
            findings.append(_far(step, "gradient", name, tensors.get(name), want=g, rounding=floor))
        for name, b in want.buffers.items():
            findings.append(_far(step, "buffer", name, got.tensors.get(name), want=b))
        return findings

    def _complaint(self, step: int, text: str) -> Finding:
        name, _, note = text.partition(": ")
        part = "buffer" if name in self._buffers else "gradient"
        return Finding(step, part, name, inf, note=note)

    def update(self, grads: GatheredTensors, got: GatheredTensors, means: GatheredTensors) -> None:
        """Compares the weights after the step that had these gradients, and their moving average.

        A weight without a gradient in one process must not be trained with zeros.
        """
        trained = {name: g for name, g in grads.tensors.items() if name in self._trained}
        want = self.training.update(self.done - 1, trained)
        self._weights("update", got, want)
        self._weights("average", means, self.training.average(self.done - 1, want))

    def loaded(self, got: GatheredTensors, exported: Mapping[str, Tensor]) -> None:
        """Compares a model loaded from a checkpoint of the current step, and its export."""
        want = self.training.again()
        self._weights("loaded", got, want)
        self._weights("exported", GatheredTensors(dict(exported), ()), want)

    def validation(self, loss: float, samples: Callable[[ReferenceSamples], ReferenceSamples]) -> None:
        want = self.training.validate(samples) * self.plan.loss_terms
        self.findings.append(_one(self.done, "validation", loss, want))

    def average_validation(
        self, loss: float, samples: Callable[[ReferenceSamples], ReferenceSamples]
    ) -> None:
        want = self.training.validate_average(samples) * self.plan.loss_terms
        self.findings.append(replace(_one(self.done, "validation", loss, want), name="the moving average"))

    def samples(self, rank: int, same: bool, when: str = "") -> None:
        """Records whether a rank would read the right samples in the next step, or later as ``when`` says."""
        note = "" if same else f"rank {rank} would read other samples"
        self.findings.append(_judged(self.done + 1, "samples", f"rank {rank}{when}", note))

    def _weights(self, part: str, got: GatheredTensors, want: Mapping[str, Tensor]) -> None:
        self._complain(part, self.done, [c for c in got.complaints if c.split(":")[0] in want])
        for name, w in want.items():
            self.findings.append(_far(self.done, part, name, got.tensors.get(name), want=w))

    def _complain(self, part: str, step: int, complaints: list[str]) -> None:
        for text in complaints:
            name, _, note = text.partition(": ")
            self.findings.append(Finding(step, part, name, inf, note=note))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _judged(step: int, part: str, name: str, note: str) -> Finding:
    """Returns a finding that is either right or wrong: wrong if there is a ``note``."""
    return Finding(step, part, name, inf if note else 0.0, note=note)


def _far(
    step: int, part: str, name: str, got: Tensor | None, *, want: Tensor, rounding: float = 0.0
) -> Finding:
    if got is None:
        return _judged(step, part, name, "is missing")
    decides = rounding > 0 and bool((want.abs() < rounding).all())
    relative_to = rounding if decides else 0.0
    return Finding(step, part, name, error(got, want, rounding), relative_to=relative_to)


def _one(step: int, part: str, got: float | None, want: float, rounding: float = 0.0) -> Finding:
    if got is None:
        return _judged(step, part, "", "is missing")
    far, size = abs(got - want), max(abs(want), rounding)
    relative_to = rounding if rounding > abs(want) else 0.0
    return Finding(step, part, "", far / size if size else far, relative_to=relative_to)
