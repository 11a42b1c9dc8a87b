"""Runs the plan's schedules: one training step, or one evaluation, over all micro batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from launcher.parallel.live import Parallel
from launcher.parallel.mode import evaluating
from launcher.parallel.read import dtype_of
from launcher.plan.facts import TensorSpec
from launcher.plan.pieces import shortened
from launcher.plan.plan import Plan
from launcher.runtime import torch_pipeline

Loss = Callable[..., torch.Tensor]
"""(output, target) of one micro batch -> mean loss, 0-d; of an output whose classes are cut, (output, target, axis)."""


class Pipeline:
    """One rank's stages on torch's pipeline runtime.

    The loss of a micro batch is scaled so that plain sums, over micro batches and data-parallel ranks, give the
    gradient of the global batch: nothing is divided afterwards.
    """

    def __init__(self, model: Parallel, inputs: Sequence[TensorSpec], loss: Loss, device: torch.device) -> None:
        self.model, self.loss = model, loss
        plan = model.plan
        self.parts = (model.axis,) if plan.operators.output is not None else ()
        self.counts = model.meshes.coords["tp"] == 0  # the ranks of tp work out the same loss
        self.first = any(p.stage.index == 0 for p in model.parts)
        self.last = any(p.stage.index == len(plan.stages) - 1 for p in model.parts)
        micros = plan.sizes.micros if plan.loss_reduction == "mean" else 1
        self.scale = plan.loss_repeats / (micros * (plan.sizes.replicas if plan.gradients_mean else 1))
        self.scaled = 1.0
        self.targets: list[torch.Tensor] = []
        self.valid: list[int] = []
        self.raw: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.keep = False
        self.before_reduce: Callable[[], None] | None = None
        lengths = plan.pieces
        self.weights = [n / sum(lengths) for n in lengths] or [1.0]
        micros = plan.sizes.micros
        self._train = torch_pipeline.runtime(
            _stages(model, inputs, device, lengths), plan.schedule, micros * len(self.weights), self._training_loss
        )
        self._evaluate = torch_pipeline.runtime(
            _stages(model, inputs, device), plan.evaluation, micros, self._evaluation_loss
        )

    def step(self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, scaled: float = 1.0) -> torch.Tensor:
        """Forward and backward of this rank's part of a batch; no gradients before, whole ones after.

        ``inputs`` are read by the first stage's ranks, ``targets`` by the last's. Returns the sum of the micro
        batches' mean losses (0-d), 0 on ranks without the last stage and on all but the first of ``tp``.
        Gradients are ``scaled`` times as large.
        """
        self.scaled = scaled
        self._run(self._train, inputs, targets, None, self.model.plan.pieces)
        if self.before_reduce is not None:
            self.before_reduce()
        self.model.reduce()
        return self._sum()

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, valid: int) -> torch.Tensor:
        """Sum of the losses of the first ``valid`` samples of this rank's part; the rest is padding. No gradients."""
        self._forward(inputs, targets, valid, self.model.plan.output_broadcast)
        return self._sum()

    @torch.no_grad()
    def predict(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """What the model makes of this rank's part of a batch, in evaluation mode.

        On the last stage's ranks; with ``output_broadcast`` on those of every stage, else ``None`` there.
        """
        self._forward(inputs, None, None, True)
        if not self.outputs:
            return None
        cut, out = self.model.plan.operators.output, torch.cat(self.outputs)
        return out if cut is None else self.model.axis.gather(out, cut)

    def _forward(
        self, inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, valid: int | None, keep: bool
    ) -> None:
        """Evaluation mode for as long as it takes. ``keep``: ``outputs`` are those of the micro batches, in order."""
        self.keep = keep
        with evaluating(p.module for p in self.model.parts):
            self._run(self._evaluate, inputs, targets, valid)
        if self.model.plan.output_broadcast:
            self.outputs = broadcast(self.outputs, self.model)

    def _run(
        self,
        run: torch_pipeline.Runtime,
        inputs: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
        valid: int | None,
        pieces: tuple[int, ...] = (),
    ) -> None:
        size, micros = self.model.plan.sizes.micro_batch, self.model.plan.sizes.micros
        sizes = {len(t) for t in (*(inputs if self.first else ()), *([] if targets is None else [targets]))}
        assert sizes <= {size * micros}, f"{sizes} samples, planned {size * micros}: torch would not notice"
        self.raw, self.outputs, self.targets = [], [], []
        if targets is not None:
            self.targets = _cut(targets, size, pieces)
            limit = len(targets) if valid is None else valid
            self.valid = [max(0, min(size, limit - size * m)) for m in range(micros)]
        count = micros * max(len(pieces), 1)
        given = list(zip(*(_cut(t, size, pieces) for t in inputs), strict=True)) if self.first else None
        numbers = list(torch.arange(count)) if self.last else None  # the target that torch knows is a number
        with self.model.running():
            torch_pipeline.run(run, given, numbers)

    def _training_loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        weight = self.weights[int(number) % len(self.weights)]
        loss = self.loss(output, self.targets[int(number)], *self.parts) * weight
        self.raw.append(loss.detach())
        return loss * (self.scale * self.scaled)

    def _evaluation_loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if self.keep:
            self.outputs.append(output)
        if not self.targets:
            return torch.zeros(())
        n = self.valid[int(number)]
        if not n:
            return torch.zeros(())
        # float64: over 50000 classes torch's float32 log_softmax is 1e-5 too low on a CPU
        loss = self.loss(output[:n].double(), self.targets[int(number)][:n], *self.parts) * n
        self.raw.append(loss)
        return loss

    def _sum(self) -> torch.Tensor:
        if not self.raw or not self.counts:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([r.double() for r in self.raw]).sum()


def broadcast(outputs: list[torch.Tensor], model: Parallel) -> list[torch.Tensor]:
    """The last stage's ``outputs`` of every micro batch, on all its pipeline's ranks: one collective."""
    plan = model.plan
    (spec,) = plan.output
    if outputs:
        flat = torch.stack(outputs)
    else:
        shape = (plan.sizes.micros, *spec.shape)
        flat = torch.empty(shape, dtype=dtype_of(spec.dtype), device=model.meshes.mesh.device_type)
    dist.broadcast(flat.view(torch.uint8), group_src=plan.sizes.places[-1], group=model.meshes.pp)  # gloo: few dtypes
    return list(flat.unbind())


def _cut(t: torch.Tensor, size: int, pieces: tuple[int, ...]) -> list[torch.Tensor]:
    """Micro batches of ``size`` samples, each in ``pieces`` of its sequence, which is dim 1."""
    return [p for m in t.split(size) for p in (m.split(pieces, 1) if pieces else (m,))]


def _stages(
    model: Parallel, inputs: Sequence[TensorSpec], device: torch.device, pieces: tuple[int, ...] = ()
) -> list[torch_pipeline.Stage]:
    plan = model.plan
    level = plan.hsdp.optimizer_level if plan.hsdp else "level1"
    out = []
    for part, half, order in zip(model.parts, model.halves, model.orders, strict=True):
        s = part.stage.index
        before = inputs if s == 0 else _flat(plan, s - 1)
        after = _flat(plan, s) if s < len(plan.stages) - 1 else plan.output
        static = {
            "takes": [tuple(_meta(t, grad=s > 0) for t in ts) for ts in _each(before, pieces)],
            "sends": [tuple(_meta(t, grad=True) for t in ts) for ts in _each(after, pieces)],
            "each": level != "level1", "again": level == "level3", "collect": half.collect,
            "carry": part.carry if pieces else None, "order": order,
        }  # fmt: skip
        out.append(torch_pipeline.stage(part.module, s, len(plan.stages), device, model.meshes.pp, **static))
    return out


def _each(specs: Sequence[TensorSpec], pieces: tuple[int, ...]) -> list[tuple[TensorSpec, ...]]:
    """Of the whole micro batch, or of each of its pieces."""
    return [tuple(shortened(t, n, sum(pieces)) for t in specs) for n in pieces] or [tuple(specs)]


def _flat(plan: Plan, boundary: int) -> tuple[TensorSpec, ...]:
    return tuple(t for c in plan.boundaries[boundary] for t in c.specs)


def _meta(t: TensorSpec, grad: bool) -> torch.Tensor:
    dtype = dtype_of(t.dtype)
    return torch.empty(t.shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)
