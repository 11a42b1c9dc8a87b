"""Builds the full model in this process, with the weights of a checkpoint or of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.job.schema.job import Job
from launcher.parallel.deferred_init.fill import tensors
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.resolve.encryption import trust
from launcher.plan.values.precision import DTYPE, HALF
from launcher.planner.plan_job import builder
from launcher.runtime.training.checkpoint_tensors import unpacked


def from_checkpoint(job: Job, folder: Path) -> torch.nn.Module:
    """Returns the model with the weights and buffers of a checkpoint of any layout."""
    checkpoint = open_checkpoint(folder, trust(job))
    blobs = read_rank(checkpoint, single(checkpoint.strategy), 0, kinds=("param", "buffer"))
    return with_values(job, {name: unpacked(blob) for name, blob in blobs.items()})


@torch.no_grad()
def with_values(job: Job, state_dict: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Returns the model with the values in ``state_dict``; a tied tensor may have any of its names."""
    with default_dtype(dtype_of(DTYPE[job.train.precision])):
        model = builder(job)()
    mine = tensors(model)
    done: set[int] = set()
    for name, t in state_dict.items():
        assert t.shape == mine[name].shape, (name, t.shape)
        assert _holds(mine[name], t), (name, t.dtype)
        mine[name].copy_(t)
        done.add(id(mine[name]))
    missing = [n for n in model.state_dict() if id(mine[n]) not in done]
    if missing:
        raise ValueError(f"no values for {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")
    return model


def _holds(mine: torch.Tensor, t: torch.Tensor) -> bool:
    """Returns true if ``t`` can be copied to ``mine``: a frozen weight may be half, an export any dtype."""
    wide = [dtype_of(name) for name in (*HALF, *DTYPE.values())]
    return t.dtype == mine.dtype or (t.dtype in wide and mine.dtype in wide)
