"""A model in one process, with the numbers of a file or of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.job.schema.job import Job
from launcher.parallel.deferred_init.fill import tensors
from launcher.parallel.trace.model_facts import default_dtype, dtype_of
from launcher.plan.values.facts import DTYPE
from launcher.plan.values.trust import trust
from launcher.planner.plan_job import builder
from launcher.runtime.training.state import unpacked


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
