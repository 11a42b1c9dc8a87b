"""A model in one process, with the numbers of a file or of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from launcher.checkpoint.blob import Blob
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.checkpoint.strategy import single
from launcher.decide import builder
from launcher.job.schema import Job
from launcher.parallel.init import tensors
from launcher.parallel.read import default_dtype, dtype_of
from launcher.plan.facts import DTYPE
from launcher.runtime.state import fill


def from_checkpoint(job: Job, folder: Path) -> torch.nn.Module:
    """The model with the weights and buffers of a checkpoint of any layout."""
    checkpoint = open_checkpoint(folder)
    return of(job, read_rank(checkpoint, single(checkpoint.strategy), 0, kinds=("param", "buffer")))


@torch.no_grad()
def of(job: Job, found: Mapping[str, Blob]) -> torch.nn.Module:
    """The model with the numbers of ``found``; a tied tensor may come under any of its names."""
    with default_dtype(dtype_of(DTYPE[job.train.precision])):
        model = builder(job)()
    mine = tensors(model)
    done: set[int] = set()
    for name, b in found.items():
        fill(mine[name], b)
        done.add(id(mine[name]))
    missing = [n for n in model.state_dict() if id(mine[n]) not in done]
    if missing:
        raise ValueError(f"no numbers for {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")
    return model
