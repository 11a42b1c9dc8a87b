"""``evaluate``: the loss on held-out samples, of the live model or of a file in one process."""

from __future__ import annotations

import torch

from launcher.data.open import open_data
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate
from launcher.models.loss import cross_entropy
from launcher.parallel.stages.half_model import narrowed
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.values.facts import COMPUTE, IGNORED, class_dims
from launcher.runtime.training import loop
from launcher.runtime.training.session import Session
from launcher.runtime.training.target_classes import check


def run(s: Session, step: Evaluate) -> None:
    loss = loop.validate(s, step.batches)
    if s.world.rank == 0:
        said = f"evaluate: validation loss {loss:.4f} after {s.step} steps"
        if s.baseline is not None:
            baseline = s.baseline * s.plan.loss_terms
            s.results["baseline"] = baseline
            said += f"; the best guess without context (unigram entropy) has {baseline:.4f}"
        s.emit({"text": said})


@torch.no_grad()
def alone(model: torch.nn.Module, job: Job, batches: int | None, terms: int = 1) -> float:
    """The same loss, over the same samples, of a whole model in this process; ``terms`` as the plan has them."""
    val = open_data(job.data, seed=job.seed, allow=job.security.allow).val
    compute, size = COMPUTE[job.train.precision], job.train.batch_size
    dtype = dtype_of(compute)
    if compute in ("bfloat16", "float16"):
        model = narrowed(model, compute)
    n = len(val) if batches is None else min(len(val), batches * size)
    total = torch.zeros((), dtype=torch.float64)
    counted = 0
    model.eval()
    piece = max(1, size // 8)  # small pieces: the logits of a whole batch may not fit
    for start in range(0, n, piece):
        indices = torch.arange(start, min(start + piece, n)).numpy()
        xs = tuple(x.to(dtype) if x.is_floating_point() else x for x in val.inputs(indices))
        y = val.targets(indices)
        output = model(*xs)
        if dims := class_dims(output.shape, y.shape):
            check(y, indices, output.shape[dims[0]], "validation", "held-out")
        total += cross_entropy(output.double(), y, reduction="sum")  # as the run does
        counted += int((y != IGNORED).sum())
    return float(total / counted) * terms
