"""Why split backwards with level3 are refused: what torch's own ZBV does with ``reshard_after_forward``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks

RANKS, STAGES, MICROS = 2, 4, 4
"""``RANKS`` is the number of pipeline ranks, and also the number of shards of each."""
V = {"there and back": ScheduleZBVZeroBubble, "in a loop": ScheduleInterleaved1F1B}


class Stage(PipelineStage):
    """torch 2.11 first sends a message to each neighbor, also from a rank to itself, which gloo cannot do."""

    def _get_init_p2p_neighbors_ops(self):
        return []


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 4, dtype=torch.float64))
        for _ in range(STAGES)
    ]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)


def loss(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return ((got - wanted) ** 2).sum()


def alone() -> dict[str, torch.Tensor]:
    model = nn.Sequential(*layers())
    x, y = batch()
    loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rank_gradients(world, order: str, drop: bool) -> dict[str, torch.Tensor | None]:
    """The full gradients of this rank's stages; ``None`` where there is none. This uses torch only."""
    mesh = init_device_mesh("cpu", (RANKS, RANKS), mesh_dim_names=("pp", "dp"))
    at, shard = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    held = (at, STAGES - 1 - at) if order == "there and back" else (at, RANKS + at)

    # shards sum their gradients and do not average them
    parts = nn.ModuleDict({str(i): part for i, part in enumerate(layers()) if i in held})
    for part in parts.values():
        for module in (*part.children(), part):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=drop)
    for module in parts.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    # one step
    stages = [Stage(part, int(i), STAGES, torch.device("cpu"), group=mesh.get_group("pp")) for i, part in parts.items()]
    schedule = V[order](stages, n_microbatches=MICROS, loss_fn=loss, scale_grads=False)
    x, y = (t.chunk(RANKS)[shard] for t in batch())
    last = {"target": y, "losses": []} if STAGES - 1 in held else {}
    schedule.step(*([x] if 0 in held else []), **last)

    # every rank calls full_tensor for all, so that none waits
    found = {name: p.grad for name, p in parts.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


@pytest.mark.parametrize(
    ("order", "drop", "right"),
    [("there and back", False, True), ("in a loop", True, True), ("there and back", True, False)],
    ids=["ZBV", "1F1B that drops weights", "ZBV that drops weights"],
)
def test_torch_loses_gradients_of_split_backwards_in_silence_where_weights_are_dropped(order, drop, right):
    """If the last case fails, this torch is correct, and the refusal in ``plan/resolve/hsdp.py`` can be removed."""
    want = alone()
    ranks = on_ranks(RANKS * RANKS, rank_gradients, order, drop)
    close = [g is not None and torch.allclose(g, want[name], rtol=1e-10) for r in ranks for name, g in r.items()]
    assert len(close) == RANKS * len(want)
    assert all(close) is right
