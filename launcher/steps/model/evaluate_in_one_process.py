"""The loss and metrics of held-out samples, computed in one process."""

from __future__ import annotations

import torch

from launcher.data.open import open_data
from launcher.data.shuffle import Indices
from launcher.job.schema.components import Loss
from launcher.job.schema.job import Job
from launcher.job.schema.objective import BCE, CrossEntropy
from launcher.objective.build import build_loss, build_metrics
from launcher.objective.losses import float64
from launcher.objective.metrics import values
from launcher.objective.model_outputs import Output, each
from launcher.parallel.half_precision import with_cast_weights
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.values.class_dims import class_dims
from launcher.plan.values.precision import COMPUTE, HALF
from launcher.runtime.training.pipeline import SamplePlace, check_classes, check_probabilities


def held_out_loss(model: torch.nn.Module, job: Job, batches: int | None, terms: int = 1) -> float:
    """Returns only the loss of ``held_out``."""
    return held_out(model, job.model_copy(update={"metrics": ()}), batches, terms)["loss"]


@torch.no_grad()
def held_out(model: torch.nn.Module, job: Job, batches: int | None, terms: int = 1) -> dict[str, float]:
    """Returns the loss and the metrics that ``evaluate`` computes on ranks, over the same samples.

    ``terms`` as in the plan.
    """
    # the model, in the compute precision of the run
    compute = COMPUTE[job.train.precision]
    dtype = dtype_of(compute)
    if compute in HALF:
        model = with_cast_weights(model, compute)
    model.eval()

    # the samples in small portions, as the logits of a full batch may not fit in memory
    allow = job.security.allow
    data = open_data(job.data, seed=job.seed, allow=allow)
    loss, val = build_loss(job.loss, allow), data.val
    metrics = build_metrics(job.metrics, job.loss, allow, data.token_bytes)
    size = job.train.batch_size
    n = len(val) if batches is None else min(len(val), batches * size)
    piece = max(1, size // 8)

    sums = torch.zeros((1 + len(metrics), 2), dtype=torch.float64)
    for start in range(0, n, piece):
        indices = torch.arange(start, min(start + piece, n)).numpy()
        y = val.targets(indices)
        output: Output = model(*(_in(dtype, x) for x in val.inputs(indices)))
        if isinstance(output, torch.Tensor):
            _check(job.loss, output, y, indices)
        wide = each(tuple(output) if isinstance(output, list) else output, float64)  # as in the run
        sums[0] += torch.stack([loss(wide, y).double(), loss.count(y)])
        for row, metric in zip(sums[1:], metrics, strict=True):
            row += metric.sums(wide, y)

    (total, counted), *measured = sums.tolist()
    return {"loss": total / counted * terms, **values(metrics, measured, "validation")}


def _check(loss: Loss, output: torch.Tensor, y: torch.Tensor, indices: Indices) -> None:
    """Raises ``RunError`` for targets that the loss does not accept."""
    at = SamplePlace("validation", "held-out")
    dims = class_dims(output.shape, y.shape)
    if isinstance(loss, CrossEntropy) and dims:
        check_classes(y, indices, output.shape[dims[0]], loss.ignore_index, at)
    elif isinstance(loss, BCE):
        check_probabilities(y, indices, at)


def _in(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Casts floating inputs; token ids stay as they are."""
    return x.to(dtype) if x.is_floating_point() else x
