"""A model in one process, with the numbers of a file or of a checkpoint, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.data.open import open_data
from launcher.job.schema.job import Job
from launcher.models.loss import cross_entropy
from launcher.parallel.deferred_init.fill import tensors
from launcher.parallel.stages.half_model import narrowed
from launcher.parallel.trace.model_facts import default_dtype, dtype_of
from launcher.plan.values.facts import COMPUTE, DTYPE, IGNORED, class_dims
from launcher.plan.values.trust import trust
from launcher.planner.plan_job import builder
from launcher.runtime.training.state import unpacked
from launcher.runtime.training.target_classes import check


def from_checkpoint(job: Job, folder: Path) -> torch.nn.Module:
    """The model with the weights and buffers of a checkpoint of any layout."""
    checkpoint = open_checkpoint(folder, trust(job))
    held = read_rank(checkpoint, single(checkpoint.strategy), 0, kinds=("param", "buffer"))
    return of(job, {name: unpacked(blob) for name, blob in held.items()})


@torch.no_grad()
def of(job: Job, found: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The model with the numbers of ``found``; a tied tensor may come under any of its names."""
    with default_dtype(dtype_of(DTYPE[job.train.precision])):
        model = builder(job)()
    mine = tensors(model)
    done: set[int] = set()
    for name, t in found.items():
        assert (t.dtype, t.shape) == (mine[name].dtype, mine[name].shape), (name, t.dtype, t.shape)
        mine[name].copy_(t)
        done.add(id(mine[name]))
    missing = [n for n in model.state_dict() if id(mine[n]) not in done]
    if missing:
        raise ValueError(f"no numbers for {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")
    return model


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, job: Job, batches: int | None, terms: int = 1) -> float:
    """The loss that ``evaluate`` finds on ranks, over the same samples; ``terms`` as the plan has them."""
    # the model, in the precision of the run
    compute = COMPUTE[job.train.precision]
    dtype = dtype_of(compute)
    if compute in ("bfloat16", "float16"):
        model = narrowed(model, compute)
    model.eval()

    # the samples, in small pieces: the logits of a whole batch may not fit
    val = open_data(job.data, seed=job.seed, allow=job.security.allow).val
    size = job.train.batch_size
    n = len(val) if batches is None else min(len(val), batches * size)
    piece = max(1, size // 8)

    total = torch.zeros((), dtype=torch.float64)
    counted = 0
    for start in range(0, n, piece):
        indices = torch.arange(start, min(start + piece, n)).numpy()
        y = val.targets(indices)
        output = model(*(_in(dtype, x) for x in val.inputs(indices)))
        if dims := class_dims(output.shape, y.shape):
            check(y, indices, output.shape[dims[0]], "validation", split="held-out")
        total += cross_entropy(output.double(), y, reduction="sum")  # as the run does
        counted += int((y != IGNORED).sum())
    return float(total / counted) * terms


def _in(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Token ids stay as they are."""
    return x.to(dtype) if x.is_floating_point() else x
