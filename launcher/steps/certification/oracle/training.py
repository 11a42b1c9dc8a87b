"""The optimizer steps of one process: plain torch, one micro batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.data.source import Dataset
from launcher.job.schema.job import Job
from launcher.job.schema.user_class import Target
from launcher.steps.certification.oracle import learning_rates, optimizers, sample_order
from launcher.steps.certification.oracle import model as models
from launcher.steps.certification.oracle.equal_draws import EqualDraws, ForeignDraws
from launcher.steps.certification.oracle.losses import ReferenceObjective
from launcher.steps.certification.oracle.samples import Narrow, ReferenceSamples

FAR = 8.0
"""The factor by which gradients must be able to grow before they overflow."""
PATIENCE = 8
"""How many samples are tried to leave experts idle."""

Prepare = Callable[[nn.Module], None]
"""What is done to every constructed model."""

Process = Callable[[int, bool], AbstractContextManager[None]]
"""Runs a block in the process of a data-parallel rank; if true, the rank's next block continues from it."""

Numbers = dict[str, Tensor]
Batch = tuple[tuple[Tensor, ...], Tensor]
"""The inputs and the targets."""


@dataclass(frozen=True)
class Cut:
    """How the batch is divided: the numbers of data-parallel ranks, and of micro batches per rank.

    ``times``: the factor by which the settings multiply gradients.
    """

    batch: int
    ranks: int
    micros: int
    steps: int
    times: int = 1

    @property
    def local(self) -> int:
        return self.batch // self.ranks


@dataclass(frozen=True)
class ReferenceResult:
    """Mean loss of the global batch, norm before clipping, gradients after it, buffers; all by first name."""

    loss: float
    norm: float
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class ReferenceTraining:
    """The reference training; ``numbers``: the initial weights, buffers and other tensors.

    Each data-parallel rank has its own buffers. After each step, all ranks take over the first rank's buffers
    that a checkpoint contains, as in DistributedDataParallel. Means over samples are averaged instead.
    """

    def __init__(
        self,
        job: Job,
        data: Dataset,
        cut: Cut,
        numbers: Mapping[str, Tensor],
        *,
        construct: Callable[[], nn.Module],
        device: torch.device,
        prepare: Prepare,
        process: Process,
    ) -> None:
        self.job, self.cut, self.device = job, cut, device
        self._construct = construct
        self._prepare, self._precision, self._process = prepare, job.train.precision, process
        self._data = data
        self._begin(numbers)
        self.optimizer = self._optimizer()
        self.objective = ReferenceObjective(job.loss, job.security.allow)
        self._rates = [g.get("lr") for g in self.optimizer.param_groups]
        self._shares = learning_rates.shares(job.schedule, cut.steps, job.security.allow)
        self._own: tuple[list[Numbers], list[Numbers], Batch]
        self._averages = _kept({n: p for n, p in self.named.items() if p.requires_grad})

    def _begin(self, numbers: Mapping[str, Tensor]) -> None:
        """Constructs a model per data-parallel rank, and a spare one for trials; they share their weights."""
        model = models.put(self._construct(), numbers, self.device)
        self._prepare(model)
        self._at_start = _kept(models.state(model))
        self.models = [model, *(self._another(model) for _ in range(self.cut.ranks - 1))]
        self._spare = self._another(model)
        self.named = dict(model.named_parameters())

    def _another(self, model: nn.Module) -> nn.Module:
        """Returns a copy of ``model``, or a new construction if it cannot be copied."""
        try:
            return models.copy_sharing_weights(model)
        except (RuntimeError, TypeError):
            new = models.put(self._construct(), models.state(model), self.device)
            self._prepare(new)
            return models.share(new, model)

    def _optimizer(self) -> torch.optim.Optimizer:
        optim, low = self.job.optim, self._precision in models.LOW
        matrices = optimizers.adamw_matrices(self.models[0])
        return optimizers.optimizer(optim, self._trained(), self.job.security.allow, matrices, low)

    def _trained(self) -> optimizers.Named:
        names: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, p in self.models[0].named_parameters(remove_duplicate=False):
            names[p] = (*names.get(p, ()), name)
        return [(names[p], p) for p in self.named.values() if p.requires_grad]

    def batch(self, step: int, narrow: Narrow | None = None) -> Batch:
        """Returns all samples of an optimizer step, in order."""
        source: ReferenceSamples = self._data.train
        indices = sample_order.dataset_indices(
            self._data.reading, self.job.seed, step, self.cut.batch, len(source)
        )
        if narrow is not None:
            source, indices = narrow.view(source), narrow.order(indices, self.cut.local)
        return self._moved(source.inputs(indices)), self._targets(source.targets(indices))

    def _moved(self, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dtype = models.LOW.get(self._precision, models.weight_dtype(self._precision))

        def moved(x: Tensor) -> Tensor:
            return x.to(self.device, dtype if x.is_floating_point() else x.dtype)

        return tuple(map(moved, xs))

    def _targets(self, y: Tensor) -> Tensor:
        """Returns the targets on the device; floating targets get the dtype of the weights."""
        return y.to(self.device, models.weight_dtype(self._precision) if y.is_floating_point() else y.dtype)

    def backward(self, batch: Batch, clip: float | None, scale: float) -> ReferenceResult:
        """Returns the loss and gradients of a step; the backward uses ``scale`` times the loss."""
        before = [_kept(models.state(m), but=self.named) for m in self.models[:2]]
        outcome = self._backward(self.models, batch, clip, scale, keep=True)
        for model in self.models:
            means = {n: outcome.buffers[n] for n in models.means_over_samples(model)}
            _put(models.persistent(model), means)
        first = models.persistent(self.models[0])
        self._own = before, [_kept(models.persistent(m)) for m in self.models[:2]], batch
        for other in self.models[1:]:
            _put(models.persistent(other), first)
        return outcome

    def _backward(
        self, ranks: Iterable[nn.Module], batch: Batch, clip: float | None, scale: float, *, keep: bool
    ) -> ReferenceResult:
        # each rank's part of the batch; keep the first rank's buffers, and means over the ranks
        self.optimizer.zero_grad(set_to_none=True)
        total, counted, buffers = 0.0, self.objective.counted(batch[1]), Numbers()
        means: dict[str, list[Tensor]] = {}
        for rank, model in enumerate(ranks):
            with self._process(rank, keep):
                total += self._accumulate(model, self._part(batch, rank), counted, scale * self.cut.times)
            own = models.persistent(model)
            buffers = buffers if rank else _kept(own)
            for name in models.means_over_samples(model):
                means.setdefault(name, []).append(own[name].detach().cpu().clone())
        buffers |= {name: torch.stack(each).mean(0) for name, each in means.items()}

        # undo loss scaling, then clip by the norm
        grads = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        for g in grads.values():
            g.div_(scale)
        squares = [g.abs().double().square().sum() for g in grads.values()]
        norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
        if clip is not None:
            # by the fp64 norm: clip_grad_norm_ sums in fp32, which gives a million values five correct digits
            nn.utils.clip_grads_with_norm_(self.named.values(), clip, norm)
        return ReferenceResult(total, norm.item(), _kept(grads), buffers)

    def _part(self, batch: Batch, rank: int) -> list[Tensor]:
        xs, y = batch
        return [t[rank * self.cut.local : (rank + 1) * self.cut.local] for t in (*xs, y)]

    def _accumulate(self, model: nn.Module, part: list[Tensor], counted: float, scale: float) -> float:
        """Accumulates the gradients of one data-parallel rank, one micro batch after the other."""
        run, total = models.forward_function(model, self._precision), 0.0
        for *xs, y in zip(*(t.chunk(self.cut.micros) for t in part), strict=True):
            with EqualDraws():
                loss = self.objective.summed(run(*xs), y) / counted
                (loss * scale).backward()
            total += loss.item()
        return total

    def _each(self, buffers: list[Numbers]) -> Iterator[nn.Module]:
        """Yields the spare model with the buffers of each rank in turn."""
        for own in buffers:
            _put(models.state(self._spare), own)
            yield self._spare

    def update(self, step: int, grads: Mapping[str, Tensor]) -> Numbers:
        """Returns the weights after an optimizer step with ``grads``, the gradients of the layout.

        An optimizer that divides by a gradient's size amplifies rounding differences. Therefore both
        optimizers use the same gradients.
        """
        for name, p in self.named.items():
            if p.requires_grad:
                p.grad = grads[name].to(self.device) if name in grads else None
        share = self.rate_share(step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * share
        self.optimizer.step()
        return _kept(self.named)

    def average(self, step: int, weights: Mapping[str, Tensor]) -> Numbers:
        """Returns the moving average after an optimizer step that resulted in these weights."""
        ema = self.job.train.ema
        if ema is None:
            return {}
        if (step + 1) % ema.every == 0:
            for name, mean in self._averages.items():
                self._averages[name] = ema.decay * mean + (1 - ema.decay) * weights[name]
        return dict(self._averages)

    def rate_share(self, step: int) -> float:
        return self._shares(step)

    def rate(self, step: int) -> float:
        """Returns the learning rate of ``optim.lr``; for a user's class that of its first group."""
        optim = self.job.optim
        rate = self._rates[0] if isinstance(optim, Target) else optim.lr
        return float(rate or 0.0) * self.rate_share(step)

    def again(self) -> Numbers:
        """Saves and loads with plain torch: tensors that no checkpoint contains are reset to step 0."""
        states = {n: t for n, t in _kept(models.state(self.models[0])).items() if n in self._saved()}
        optimizer = self.optimizer.state_dict()
        self._begin(self._at_start | states)
        self.optimizer = self._optimizer()
        self.optimizer.load_state_dict(optimizer)
        return {n: t for n, t in _kept(models.state(self.models[0])).items() if n in self._saved()}

    def _saved(self) -> set[str]:
        return {*self.named, *models.persistent(self.models[0])}

    def validate_average(self, samples: Callable[[ReferenceSamples], ReferenceSamples]) -> float:
        """Returns ``validate`` with the moving average as weights."""
        weights = _kept({name: self.named[name] for name in self._averages})
        _put(self.named, self._averages)
        try:
            return self.validate(samples)
        finally:
            _put(self.named, weights)

    @torch.no_grad()
    def validate(self, samples: Callable[[ReferenceSamples], ReferenceSamples]) -> float:
        """Returns the mean loss over held-out samples, each counted once; the loss is computed in fp64."""
        validation = samples(self._data.val)
        total, count, size = 0.0, 0.0, max(1, self.cut.local // self.cut.micros)
        model = self.models[0]
        with _evaluating(model), self._process(0, True):
            for start in range(0, len(validation), size):
                indices = np.arange(start, min(start + size, len(validation)))
                xs = self._moved(validation.inputs(indices))
                with EqualDraws():
                    output = models.forward_function(model, self._precision)(*xs)
                y = self._targets(validation.targets(indices))
                total += self.objective.summed(_double(output), y).item()
                count += self.objective.counted(y)
        return total / count

    def statistics(self) -> dict[str, bool]:
        """Returns the buffers that ranks updated from their own samples in the last step.

        Each is true if losses read it. Only the first rank's are kept. A loss that reads them does not depend
        on all samples; in one process it would.
        """
        before, after, batch = self._own
        if len(after) < 2:
            return {}
        by_data = [n for n, t in after[0].items() if not torch.equal(t, after[1][n])]

        def loss(buffers: Numbers) -> float:
            with torch.no_grad():
                for model in self._each([buffers]):
                    *xs, y = (t.chunk(self.cut.micros)[0] for t in self._part(batch, 1))
                    with EqualDraws(), self._process(1, False):
                        out = models.forward_function(model, self._precision)(*xs)
                    return float(self.objective.summed(out, y))
            return 0.0

        own = loss(before[1]) if by_data else 0.0
        return {n: loss(before[1] | {n: after[0][n]}) != own for n in by_data}

    def draws(self) -> tuple[bool, dict[str, str]]:
        """Finds out whether a forward draws random numbers, and which modules draw from other sources.

        Runs the first batch in both modes, without lasting effects.
        """
        batch, buffers = self.batch(0), [_kept(models.state(m), but=self.named) for m in self.models]
        foreign = ForeignDraws(self._spare)
        with EqualDraws() as equal_draws, foreign.watching():
            self._backward(self._each(buffers), batch, None, 1.0, keep=False)
            with torch.no_grad(), _evaluating(self._spare):
                for rank, model in enumerate(self._each(buffers)):
                    *xs, _ = self._part(batch, rank)
                    with self._process(rank, False):
                        models.forward_function(model, self._precision)(
                            *(x.chunk(self.cut.micros)[0] for x in xs)
                        )
        self.optimizer.zero_grad(set_to_none=True)
        return equal_draws.drew, foreign.foreign

    def narrow(self, step: int) -> Narrow:
        """Returns a batch for ``step`` in which each rank leaves different weights without a gradient.

        Such a batch is unusual: if its loss is not finite, full samples are repeated. For some data no such
        batch exists.
        """
        positions, best = True, None
        for pick in range(min(PATIENCE, self.cut.local)):
            idle = self._idle(step, Narrow(pick, positions))
            if idle is None and positions:
                positions = False
                idle = self._idle(step, Narrow(pick, positions))
            best = best or Narrow(pick, positions)
            if not idle or not any(idle):
                return best
            if len(set(idle)) > 1:
                return Narrow(pick, positions)
        return best or Narrow(0, False)

    def scale(self, most: float) -> float:
        """Returns ``most``, halved until the gradients of the first step are far from overflow."""
        batch, buffers = self.batch(0), [_kept(models.state(m), but=self.named) for m in self.models]
        while most > 1:
            outcome = self._backward(self._each(buffers), batch, None, most * FAR, keep=False)
            if np.isfinite(outcome.norm):
                break
            most /= 2
        return most

    def _idle(self, step: int, narrow: Narrow) -> list[frozenset[str]] | None:
        """Returns the names without a gradient on each data-parallel rank.

        Returns ``None`` if there is no finite loss.
        """
        idle = []
        try:
            batch = self.batch(step, narrow)
            counted = self.objective.counted(batch[1])
            buffers = [_kept(models.state(m), but=self.named) for m in self.models]

            for rank, model in enumerate(self._each(buffers)):
                self.optimizer.zero_grad(set_to_none=True)
                with self._process(rank, False):
                    loss = self._accumulate(model, self._part(batch, rank), counted, 1.0)
                if not abs(loss) < float("inf"):
                    return None
                without = (n for n, p in self.named.items() if p.requires_grad and p.grad is None)
                idle.append(frozenset(without))
        except Exception:  # the model may raise it: the data is unusual
            return None
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return idle


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode for the block."""
    model.eval()
    try:
        yield
    finally:
        model.train()


@torch.no_grad()
def _put(to: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
    for name, t in numbers.items():
        to[name].copy_(t)


def _kept(tensors: Mapping[str, Tensor], but: Mapping[str, Tensor] | None = None) -> Numbers:
    """Returns copies in host memory."""
    return {n: t.detach().to("cpu", copy=True) for n, t in tensors.items() if n not in (but or {})}


def _double(output: Any) -> Any:
    """Converts a tensor, or the tensors in a tuple or a dict, to float64."""
    if isinstance(output, Tensor):
        return output.double() if output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: _double(value) for key, value in output.items()}
    return tuple(map(_double, output))
