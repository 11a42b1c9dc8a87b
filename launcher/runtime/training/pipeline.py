"""Runs the plan's schedules: one training step, or one evaluation, over all micro batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import RunError
from launcher.objective.losses import Loss
from launcher.objective.metrics import Metric
from launcher.objective.structure import Output, each, float64, formed
from launcher.parallel.model_state.restore_state import untouched
from launcher.parallel.parallel_model import ParallelModel
from launcher.parallel.sharding.output_share import OutputShare, output_share
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.partition.sequence_chunks import shortened
from launcher.plan.plan import Plan
from launcher.plan.values.facts import TensorSpec
from launcher.runtime.torch_private import pipelining


class Pipeline:
    """One rank's stages on torch's pipeline runtime.

    The loss of a micro batch is the sum over its targets that count, divided by their number in the
    global batch: plain sums, over micro batches and data-parallel ranks, give the gradient, and
    nothing is divided afterwards.

    ``around``: entered around the forwards and backwards of each step and evaluation.
    ``measured``: of the last step or evaluation a sum and a count for each of ``metrics``, this rank's
    share, (metrics, 2) float64 on the device.
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

        # what this rank has to do with the loss
        place = model.meshes.coords["tp"]
        self.first_of_stage = place == 0
        self.first = any(p.stage.index == 0 for p in model.parts)
        self.last = any(p.stage.index == len(plan.stages) - 1 for p in model.parts)
        self.share = OutputShare(None, counts=False)
        if self.last:
            self.share = output_share(plan, model.axis, place, model.groups)
        compilation = plan.compilation
        if self.last and compilation is not None and compilation.loss and model.compiled is not None:
            from launcher.parallel.forward.compile import compile_loss  # torch._dynamo takes a second

            self.step_loss = compile_loss(loss, compilation, model.compiled, model.axis)
        self.scale = plan.loss_repeats * plan.loss_terms
        self.scale *= 1 if plan.gradients_mean else plan.sizes.replicas

        # the state of one step
        self.scaled = 1.0
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

        # one runtime for each schedule; sequences are cut in training only
        training = _stages(model, inputs, device, plan.pieces, made=_output(plan))
        count = plan.sizes.micros * max(len(plan.pieces), 1)
        self._train = pipelining.runtime(training, plan.schedule, count, self._training_loss)
        whole, micros = _stages(model, inputs, device, made=plan.output), plan.sizes.micros
        self._evaluate = pipelining.runtime(whole, plan.evaluation, micros, self._evaluation_loss)

    def step(
        self,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        scaled: float = 1.0,
        measuring: bool = False,
    ) -> torch.Tensor:
        """Forward and backward of this rank's part of a batch; no gradients before, whole ones after.

        ``inputs`` are read by the first stage's ranks, ``targets`` by the last's. Returns this rank's share
        (0-d) of the global batch's mean loss: the sum over all ranks is the mean. It is 0 on ranks without
        the last stage and on all but the first of ``tp``, NaN when no target of the global batch counts.
        Gradients are ``scaled`` times as large; ``measuring``: ``measured`` is of this step.
        """
        self.scaled, self.measuring = scaled, measuring
        self.count.start(targets if self.last else None)
        self._run(self._train, inputs, targets, pieces=self.model.plan.pieces)
        if self.before_reduce is not None:
            self.before_reduce()
        self.model.reduce()
        total = self._sum(counts=self.share.counts)
        return total / self.count.whole() if self.last else total

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, valid: int
    ) -> torch.Tensor:
        """Loss and number of targets that count, summed over the first ``valid`` samples of this rank's part.

        The rest is padding. No gradients. Both are 0 on ranks where ``step``'s loss is.
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
        """What the model makes of this rank's part of a batch, in evaluation mode.

        On the last stage's ranks; with ``output_broadcast`` on those of every stage, else ``None`` there.
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
        """Evaluation mode for as long as it takes.

        ``keep``: ``outputs`` are those of the micro batches, in order. Nothing of it stays, as
        ``launcher.plan.refusals.evaluation`` has it.
        """
        self.keep = keep
        modules = [p.module for p in self.model.parts]
        with untouched(modules, self.model.plan.observed.restored), self.model.evaluating():
            self._run(self._evaluate, inputs, targets, valid=valid)
        if self.model.plan.output_broadcast:
            self.outputs = broadcast(self.outputs, self.model)

    def _run(
        self,
        run: pipelining.Runtime,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        *,
        valid: int | None = None,
        pieces: tuple[int, ...] = (),
    ) -> None:
        """The schedule of ``run``. ``valid``: so many samples are no padding, all where it is ``None``."""
        self._check_sizes(inputs, targets)
        size = self.model.plan.sizes.micro_batch
        micros = self.model.plan.sizes.micros

        # what the loss of each micro batch takes
        self.raw, self.outputs, self.targets = [], [], []
        self.measured = torch.zeros_like(self.measured)
        if targets is not None:
            self.targets = _cut(targets, size, pieces)
            limit = len(targets) if valid is None else valid
            self.valid = [max(0, min(size, limit - size * m)) for m in range(micros)]

        # what the first and the last stage are given
        count = micros * max(len(pieces), 1)
        given = list(zip(*(_cut(t, size, pieces) for t in inputs), strict=True)) if self.first else None
        numbers = list(torch.arange(count)) if self.last else None  # the target that torch knows is a number
        with self.model.running(), self.around():
            pipelining.run(run, given, numbers)

    def _check_sizes(self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None) -> None:
        """Raises ``RunError`` for samples of another shape than was planned."""
        mine = [*inputs] if self.first else []
        if targets is not None:
            mine.append(targets)
        sizes = {len(t) for t in mine}
        planned_size = self.model.plan.sizes.micro_batch * self.model.plan.sizes.micros
        assert sizes <= {planned_size}, f"{sizes} samples, planned {planned_size}: torch would not notice"

        # a stage that takes the inputs checks their shape too
        if not self.first:
            return
        for got, planned in zip(inputs, self.model.plan.inputs, strict=True):
            shape, first = tuple(got.shape[1:]), planned.shape[1:]
            if shape != first:
                text = f"the data returned inputs of shape {shape} a sample where {first} was planned"
                raise RunError(f"{text}, that of the first one; all samples must have one shape")

    def _training_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        output = formed(output, self.model.plan.output_keys)
        targets = self.share.targets(self.targets[int(number)])
        loss = self.step_loss(output, targets, *self.share.parts)
        self.raw.append(loss.detach())
        self._measure(each(output, torch.Tensor.detach), targets, self.share.parts, counts=self.share.counts)
        whole = self.count.whole()
        return loss * (self.scale * self.scaled / torch.where(whole == 0, 1, whole)).to(loss.dtype)

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
        parts = () if self.model.plan.sharding is not None else self.share.parts  # evaluated whole
        output, targets = each(output, lambda t: float64(t[:n])), self.targets[int(number)][:n]
        loss = self.loss(output, targets, *parts)
        self.raw.append(loss)
        self._measure(output, targets, parts, counts=self.first_of_stage)
        return loss

    @torch.no_grad()
    def _measure(self, output: Output, targets: torch.Tensor, parts: tuple[Axis, ...], counts: bool) -> None:
        """All ranks that have parts of an output come here; ``counts``: this one's figures are added up."""
        if not self.measuring or not self.metrics:
            return
        found = torch.stack([m.sums(output, targets, *parts) for m in self.metrics])
        if counts:
            self.measured += found

    def _sum(self, counts: bool) -> torch.Tensor:
        if not self.raw or not counts:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([r.double() for r in self.raw]).sum()


class _Count:
    """What the targets of the global batch count, summed over data-parallel ranks while first stages run."""

    def __init__(self, model: ParallelModel, loss: Loss, device: torch.device) -> None:
        self._loss = loss
        self._group = model.meshes.dp
        self._device = device
        self._whole = torch.zeros((), dtype=torch.float64, device=device)
        self._work: dist.Work | None = None

    def start(self, targets: torch.Tensor | None) -> None:
        """``None``: not of the last stage, whose ranks alone are to know."""
        if targets is None:  # a new one, for who asks may add up in place
            self._whole = torch.zeros((), dtype=torch.float64, device=self._device)
            return
        self._whole = self._loss.count(targets)
        if self._group is not None:
            self._work = dist.all_reduce(self._whole, group=self._group, async_op=True)

    def whole(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._whole


def broadcast(outputs: list[torch.Tensor], model: ParallelModel) -> list[torch.Tensor]:
    """The last stage's ``outputs`` of every micro batch, on all its pipeline's ranks: one collective."""
    plan = model.plan
    (spec,) = plan.output
    if outputs:
        flat = torch.stack(outputs)
    else:
        shape = (plan.sizes.micros, *spec.shape)
        flat = torch.empty(shape, dtype=dtype_of(spec.dtype), device=model.meshes.mesh.device_type)
    as_bytes = flat.view(torch.uint8)  # gloo knows few dtypes
    dist.broadcast(as_bytes, group_src=plan.sizes.places[-1], group=model.meshes.pp)
    return list(flat.unbind())


def _cut(t: torch.Tensor, size: int, pieces: tuple[int, ...]) -> list[torch.Tensor]:
    """Micro batches of ``size`` samples, each in ``pieces`` of its sequence, which is dim 1."""
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
) -> list[pipelining.RuntimeStage]:
    """``made``: what a rank of the last stage makes of the model's output."""
    plan = model.plan
    level = plan.hsdp.optimizer_level if plan.hsdp else "level1"
    out = []
    each = zip(model.parts, model.halves, model.orders, model.reductions, strict=True)
    for part, half, order, reductions in each:
        # what it takes and hands on, and for what of it there are gradients
        index = part.stage.index
        before, takes = inputs, [False] * len(inputs)
        if index > 0:
            before, takes = _flat(plan, index - 1)
        after, gives = made, [True] * len(made)
        if index < len(plan.stages) - 1:
            after, gives = _flat(plan, index)

        stage = pipelining.RuntimeStage(
            part.module,
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
    """What a rank of the last stage makes in training."""
    return plan.output if plan.sharding is None else plan.sharding.stages[-1].gives


def _each(specs: Sequence[TensorSpec], pieces: tuple[int, ...]) -> list[tuple[TensorSpec, ...]]:
    """Of the whole micro batch, or of each of its pieces."""
    return [tuple(shortened(t, n, sum(pieces)) for t in specs) for n in pieces] or [tuple(specs)]


def _flat(plan: Plan, boundary: int) -> tuple[tuple[TensorSpec, ...], list[bool]]:
    """What crosses, and for what of it a gradient comes back."""
    crossing = plan.boundaries[boundary]
    return tuple(t for c in crossing for t in c.specs), [c.trains for c in crossing for _ in c.specs]


def _meta(t: TensorSpec, grad: bool) -> torch.Tensor:
    dtype = dtype_of(t.dtype)
    return torch.empty(t.shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)
