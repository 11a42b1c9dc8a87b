"""Runs the schedule of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import RunError
from launcher.objective.losses import Loss, float64
from launcher.objective.metrics import Metric
from launcher.objective.model_outputs import Output, each, formed
from launcher.optional import matrices
from launcher.parallel.fsdp.shard import pipeline_module
from launcher.parallel.model_state.module_globals import files_of, put_back
from launcher.parallel.model_state.python_state import untouched
from launcher.parallel.output_share import OutputShare, output_share
from launcher.parallel.parallel_model import ParallelModel
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.cut.sequence_chunks import shortened
from launcher.plan.plan import Plan
from launcher.plan.values.model_graph import EmbeddingLookup
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.runtime.torch_private import pipelining, reducing_stage


class PipelineRuntime:
    """One rank's stages on torch's pipeline runtime.

    The loss of a micro batch is the sum over its counted targets, divided by their number in the global
    batch. So plain sums over micro batches and data-parallel ranks give the gradient, and no division
    follows.

    ``around``: makes the context manager in which each step and evaluation runs. ``measured``: a sum and a
    count for each of ``metrics``, this rank's share of the last step or evaluation, as float64 of shape
    (metrics, 2) on the device.
    """

    def __init__(
        self,
        model: ParallelModel,
        inputs: Sequence[TensorSpec],
        loss: Loss,
        device: torch.device,
        metrics: Sequence[Metric] = (),
    ) -> None:
        self.model = model
        self.loss = loss
        self.step_loss: Callable[..., torch.Tensor] = loss
        self.metrics = tuple(metrics)
        self.device = device
        plan = model.plan

        # this rank's share of the loss
        place = model.meshes.coords["tp"]
        self.first_of_stage = place == 0
        self.first = any(p.stage.index == 0 for p in model.parts)
        self.last = any(p.stage.index == len(plan.stages) - 1 for p in model.parts)
        self.share = OutputShare(None, counts=False)
        if self.last:
            self.share = output_share(plan, model.axis, place)
        if self.last and plan.sharding is not None:
            self.share = matrices.matrix_share(plan.sharding, place, model.groups)
        compilation = plan.compilation
        if self.last and compilation is not None and compilation.loss and model.compiled is not None:
            from launcher.parallel.compile import compile_loss  # torch._dynamo takes a second

            self.step_loss = compile_loss(loss, compilation, model.compiled, model.axis)
        self.scale = plan.loss_repeats * plan.loss_terms
        self.scale *= 1 if plan.gradients_mean else plan.sizes.replicas

        # the state of one step
        self.loss_scale = 1.0
        self.count = _Count(model, loss, device)
        self.targets: list[torch.Tensor] = []
        self.valid: list[int] = []
        self.raw: list[torch.Tensor] = []
        self.measuring = False
        self.measured = torch.zeros((len(self.metrics), 2), dtype=torch.float64, device=device)
        self.outputs: list[torch.Tensor] = []
        self.keep = False
        self.before_reduce: Callable[[], None] | None = None
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext

        # one runtime per schedule; sequences are divided only in training
        training = _stages(model, inputs, device, plan.pieces, made=_output(plan))
        count = plan.sizes.micros * max(len(plan.pieces), 1)
        self._train = pipelining.runtime(training, plan.schedule, count, self._training_loss)
        full_stages, micros = _stages(model, inputs, device, made=plan.output), plan.sizes.micros
        self._evaluate = pipelining.runtime(full_stages, plan.evaluation, micros, self._evaluation_loss)

    def step(
        self,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        loss_scale: float = 1.0,
        measuring: bool = False,
    ) -> torch.Tensor:
        """Runs forward and backward of this rank's part of a batch; gradients must be cleared before.

        The first stage's ranks use ``inputs``, the last stage's ``targets``. Returns this rank's share (0-d)
        of the global batch's mean loss: the sum over all ranks is the mean. It is 0 on ranks without the last
        stage and on all but the first rank of ``tp``; it is NaN if no target of the global batch counts.
        Gradients are complete and multiplied by ``loss_scale``. If ``measuring``, ``measured`` is updated.
        Raises ``RunError`` if an earlier forward changed weights or statistics in a way that this layout
        cannot reproduce, and if code of the user's has disabled gradients: nothing would be trained.
        """
        if not torch.is_grad_enabled():
            text = "gradients are disabled: a callback, the data, a metric or the optimizer has called"
            raise RunError(f"{text} torch.set_grad_enabled(False); write `with torch.no_grad():` instead")
        changes = self.model.changes
        if text := changes.take(any_difference=changes.unread):
            raise RunError(text)
        self.loss_scale, self.measuring = loss_scale, measuring
        self.count.start(targets if self.last else None)
        self._run(self._train, inputs, targets, pieces=self.model.plan.pieces)
        if self.before_reduce is not None:
            self.before_reduce()
        self.model.reduce()
        total = self._sum(counts=self.share.counts)
        return total / self.count.total() if self.last else total

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, valid: int
    ) -> torch.Tensor:
        """Returns the loss and the number of targets that count, summed over ``valid`` samples.

        These are the first ones of this rank's part. The other samples are padding. Computes no gradients.
        Both are 0 on the ranks whose ``step`` returns 0.
        """
        self.measuring = True
        self._forward(inputs, targets, valid, keep=self.model.plan.output_broadcast)
        total = self._sum(counts=self.first_of_stage)
        counted = torch.zeros((), device=self.device)
        if self.last and self.first_of_stage and targets is not None:
            counted = self.loss.count(targets[:valid])
        return torch.stack([total, counted.to(total)])

    @torch.no_grad()
    def predict(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the model's output for this rank's part of a batch, in evaluation mode.

        The ranks of the last stage get it, with ``output_broadcast`` those of every stage; all others get
        ``None``.
        """
        self._forward(inputs, None, None, keep=True)
        if not self.outputs:
            return None
        cut = self.model.plan.operators.output
        out = torch.cat(self.outputs)
        return out if cut is None else self.model.axis.gather(out, cut)

    def _forward(
        self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, valid: int | None, keep: bool
    ) -> None:
        """Runs the forward in evaluation mode.

        ``keep``: collects ``outputs`` of the micro batches, in order. The model's state does not change:
        ``launcher.plan.refusals.evaluation`` says why.
        """
        self.keep = keep
        modules = [p.module for p in self.model.parts]
        observed = self.model.plan.observed
        around = put_back(self._files) if observed.moves else nullcontext()
        with around, untouched(modules, observed.restored), self.model.evaluating():
            self._run(self._evaluate, inputs, targets, valid=valid)
        if self.model.plan.output_broadcast:
            self.outputs = broadcast(self.outputs, self.model)

    @cached_property
    def _files(self) -> list[str]:
        """The names of the Python modules that define this rank's part of the model."""
        return files_of(*(p.module for p in self.model.parts))

    def _run(
        self,
        run: pipelining.Runtime,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        *,
        valid: int | None = None,
        pieces: tuple[int, ...] = (),
    ) -> None:
        """Runs the schedule of ``run``; ``valid``: the number of samples before padding, ``None`` for all."""
        self._check_sizes(inputs, targets)
        size = self.model.plan.sizes.micro_batch
        micros = self.model.plan.sizes.micros

        # prepare what the loss of each micro batch needs
        self.raw, self.outputs, self.targets = [], [], []
        self.measured = torch.zeros_like(self.measured)
        if targets is not None:
            self.targets = _cut(targets, size, pieces)
            limit = len(targets) if valid is None else valid
            self.valid = [max(0, min(size, limit - size * m)) for m in range(micros)]

        # prepare the arguments of the first and the last stage
        count = micros * max(len(pieces), 1)
        arguments = list(zip(*(_cut(t, size, pieces) for t in inputs), strict=True)) if self.first else None
        numbers = list(torch.arange(count)) if self.last else None  # torch's target is an index into ours
        with self.model.running(), self.around():
            pipelining.run(run, arguments, numbers)

    def _check_sizes(self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None) -> None:
        """Raises ``RunError`` for samples whose shape differs from the plan."""
        mine = [*inputs] if self.first else []
        if targets is not None:
            mine.append(targets)
        sizes = {len(t) for t in mine}
        planned_size = self.model.plan.sizes.micro_batch * self.model.plan.sizes.micros
        assert sizes <= {planned_size}, f"{sizes} samples, planned {planned_size}: torch would not notice"

        # a stage that receives the inputs also checks their shape
        if not self.first:
            return
        for got, planned in zip(inputs, self.model.plan.inputs, strict=True):
            shape, first = tuple(got.shape[1:]), planned.shape[1:]
            if shape != first:
                text = f"the data returned inputs of shape {shape} for a sample, but the plan is for {first}"
                raise RunError(f"{text}, the shape of the first sample; all samples must have one shape")

    def _training_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        output = formed(output, self.model.plan.output_keys)
        targets = self.share.targets(self.targets[int(number)])
        loss = self.step_loss(output, targets, *self.share.parts)
        self.raw.append(loss.detach())
        self._measure(each(output, torch.Tensor.detach), targets, self.share.parts, counts=self.share.counts)
        denominator = self.count.total()
        return loss * (self.scale * self.loss_scale / torch.where(denominator == 0, 1, denominator)).to(
            loss.dtype
        )

    def _evaluation_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        output = formed(output, self.model.plan.output_keys)
        if self.keep:
            self.outputs.append(output)
        if not self.targets:
            return torch.zeros((), device=self.device)
        n = self.valid[int(number)]
        if not n:
            return torch.zeros((), device=self.device)
        # float64: over 50000 classes torch's float32 log_softmax is 1e-5 too low on a CPU
        parts = () if self.model.plan.sharding is not None else self.share.parts  # evaluated unsharded
        output, targets = each(output, lambda t: float64(t[:n])), self.targets[int(number)][:n]
        loss = self.loss(output, targets, *parts)
        self.raw.append(loss)
        self._measure(output, targets, parts, counts=self.first_of_stage)
        return loss

    @torch.no_grad()
    def _measure(self, output: Output, targets: torch.Tensor, parts: tuple[Axis, ...], counts: bool) -> None:
        """Computes the metrics; all ranks with shards of an output call it. ``counts``: adds the sums."""
        if not self.measuring or not self.metrics:
            return
        sums = torch.stack([m.sums(output, targets, *parts) for m in self.metrics])
        if counts:
            self.measured += sums

    def _sum(self, counts: bool) -> torch.Tensor:
        if not self.raw or not counts:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([r.double() for r in self.raw]).sum()


class _Count:
    """The number of counted targets in the global batch, summed over data-parallel ranks asynchronously."""

    def __init__(self, model: ParallelModel, loss: Loss, device: torch.device) -> None:
        self._loss = loss
        self._group = model.meshes.dp
        self._device = device
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._work: dist.Work | None = None

    def start(self, targets: torch.Tensor | None) -> None:
        """Starts the sum; ``targets`` is ``None`` outside the last stage, which alone needs the result."""
        if targets is None:  # a new tensor, as callers may add to it in place
            self._total = torch.zeros((), dtype=torch.float64, device=self._device)
            return
        self._total = self._loss.count(targets)
        if self._group is not None:
            self._work = dist.all_reduce(self._total, group=self._group, async_op=True)

    def total(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total


def broadcast(outputs: list[torch.Tensor], model: ParallelModel) -> list[torch.Tensor]:
    """Sends the ``outputs`` of all micro batches from the last stage to every stage, in one collective."""
    plan = model.plan
    (spec,) = plan.output
    if outputs:
        flat = torch.stack(outputs)
    else:
        shape = (plan.sizes.micros, *spec.shape)
        flat = torch.empty(shape, dtype=dtype_of(spec.dtype), device=model.meshes.mesh.device_type)
    as_bytes = flat.view(torch.uint8)  # gloo supports few dtypes
    dist.broadcast(as_bytes, group_src=plan.sizes.places[-1], group=model.meshes.pp)
    return list(flat.unbind())


def _cut(t: torch.Tensor, size: int, pieces: tuple[int, ...]) -> list[torch.Tensor]:
    """Splits into micro batches of ``size`` samples, each into ``pieces`` along its sequence (dim 1)."""
    micros = t.split(size)
    if not pieces:
        return [*micros]
    return [piece for micro in micros for piece in micro.split(pieces, 1)]


def _stages(
    model: ParallelModel,
    inputs: Sequence[TensorSpec],
    device: torch.device,
    pieces: tuple[int, ...] = (),
    *,
    made: Sequence[TensorSpec],
) -> list[reducing_stage.ReducingStage]:
    """Returns the stages of this rank; ``made``: a last-stage rank's share of the model's output."""
    plan = model.plan
    level = plan.hsdp.optimizer_level if plan.hsdp else "level1"
    out = []
    each = zip(model.parts, model.halves, model.orders, model.reductions, strict=True)
    for part, half, order, reductions in each:
        # the stage's inputs and outputs, and which of them have gradients
        index = part.stage.index
        before, takes = inputs, [False] * len(inputs)
        if index > 0:
            before, takes = _flat(plan, index - 1)
        after, gives = made, [True] * len(made)
        if index < len(plan.stages) - 1:
            after, gives = _flat(plan, index)

        stage = reducing_stage.ReducingStage(
            pipeline_module(part.module),
            index,
            len(plan.stages),
            device,
            group=model.meshes.pp,
            takes=[tuple(map(_meta, ts, takes)) for ts in _each(before, pieces)],
            sends=[tuple(map(_meta, ts, gives)) for ts in _each(after, pieces)],
            reduce_each=level != "level1",
            reshard_each=level == "level3",
            collect=half.collect,
            carry=part.carry if pieces else None,
            order=order,
            prefetch=model.prefetch,
            reductions=reductions,
        )
        out.append(stage)
    return out


def _output(plan: Plan) -> tuple[TensorSpec, ...]:
    """Returns what a rank of the last stage outputs in training."""
    return plan.output if plan.sharding is None else plan.sharding.stages[-1].gives


def _each(specs: Sequence[TensorSpec], pieces: tuple[int, ...]) -> list[tuple[TensorSpec, ...]]:
    """Returns the specs of the full micro batch, or of each of its sequence chunks."""
    return [tuple(shortened(t, n, sum(pieces)) for t in specs) for n in pieces] or [tuple(specs)]


def _flat(plan: Plan, boundary: int) -> tuple[tuple[TensorSpec, ...], list[bool]]:
    """Returns the tensors that cross a boundary, and whether each has a gradient."""
    crossing = plan.boundaries[boundary]
    return tuple(t for c in crossing for t in c.sent), [grad for c in crossing for grad in c.gradients]


def _meta(t: TensorSpec, grad: bool) -> torch.Tensor:
    dtype = dtype_of(t.dtype)
    return torch.empty(t.shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)


Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplePlace:
    """Where samples are read: ``when``, such as ``step 3``, and the ``split``."""

    when: str
    split: str


def check_classes(targets: Tensor, indices: Indices, classes: int, ignored: int, at: SamplePlace) -> None:
    """Raises ``RunError`` for ``targets`` of the samples ``indices`` that are not classes."""
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignored)
    if wrong.any():
        known = f"{classes} classes: 0 to {classes - 1}, and {ignored} is ignored"
        cure = "Look at the data, or give the model more classes"
        raise RunError(f"{_first(targets, wrong, indices, at)}, but the model's output has {known}. {cure}")


def check_probabilities(targets: Tensor, indices: Indices, at: SamplePlace) -> None:
    """Raises ``RunError`` for targets that are not between 0 and 1."""
    wrong = ~((targets >= 0) & (targets <= 1))
    if wrong.any():
        text = _first(targets, wrong, indices, at)
        raise RunError(f"{text}, but the loss bce takes numbers from 0 to 1. Look at the data")


def check_ids(
    inputs: Sequence[Tensor], indices: Indices, lookups: Sequence[EmbeddingLookup], at: SamplePlace
) -> None:
    """Raises ``RunError`` for ids in ``inputs`` that a table of the model has no row for."""
    for table in lookups:
        ids = inputs[table.place]
        wrong = (ids < table.first) | (ids >= table.end)
        if wrong.any():
            text = _first(ids, wrong, indices, at, f"an id of input {table.place}")
            where = table.module or "the model"
            known = f"{where} has a table of {table.rows} rows, for ids from {table.first} to {table.end - 1}"
            more = int(ids.max()) - table.end + 1
            cure = (
                f"give the table at least {table.rows + more} rows"
                if more > 0
                else "mask values that are not ids"
            )
            raise RunError(f"{text}, but {known}. Look at the data, or {cure}")


def _first(
    targets: Tensor, wrong: Tensor, indices: Indices, at: SamplePlace, noun: str = "the target"
) -> str:
    spot, *below = wrong.nonzero()[0].tolist()
    more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
    inside = f" at {', '.join(map(str, below))}" if below else ""
    number = targets[(spot, *below)].item()
    return f"{at.when}: {noun} of {at.split} sample {indices[spot]}{inside} is {number}{more}"
