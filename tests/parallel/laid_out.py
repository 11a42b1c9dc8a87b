"""Small models laid out over ranks, and what scripts wrap around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.parallel.local_tensors import local
from launcher.parallel.user_script import Net
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from tests.parity import job

TIED: dict[str, Any] = {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}}
SHARDED: dict[str, Any] = {"pipeline": {"stages": 2}, "hsdp": {"shard_size": 2, "threshold": 0},
                           "grid": {"dp_replicate": 2}}  # fmt: skip
SMALL = {"model__layers": 2}


def plans(parallel: dict[str, Any], **changes: Any) -> tuple[Any, Plan]:
    asked = job(parallel=parallel, **SMALL, **changes)
    return asked, plan_job(asked)


def spoil(net: Net, rank: int) -> None:
    """Change the numbers, differently on every rank."""
    with torch.no_grad():
        for same in net.copies().values():
            for n, t in enumerate(same):
                local(t).copy_(local(t) + (rank + 1) * (n + 1))


class Around(nn.Module):
    """A wrapper as scripts write it: a container that adds a level of names above the model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"_backbone": net})
