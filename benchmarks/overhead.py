"""Compares the step time of the launcher with that of a hand-written loop on the same parts of torch.

Both train the default recipe's model in the default recipe's layout (2 stages x 2-way FSDP2, 1F1B, tied
embeddings) on the same batches, in the same four processes, in turn: A B A B. Run it on an idle machine:

    python benchmarks/overhead.py [--blocks 8] [--steps 6] [override ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks


def ours(world: World, job: Job, plan: Plan) -> Any:
    """Return a function that runs one optimizer step as ``runtime.training.loop`` does."""
    from launcher.optim.build import scale_lr
    from launcher.runtime.training.loop import step
    from launcher.steps.model import build_session

    live = build_session.build(world, job, plan, Path())

    def one() -> float:
        scale_lr(live.optimizer, 1.0)
        loss, _ = step(live, job.train.clip_norm)
        live.step += 1
        return loss

    return one


def by_hand(world: World, job: Job, plan: Plan) -> Any:
    """Return the same for a loop that is written for exactly this model and layout."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import cross_entropy

    from launcher.data.open import open_data
    from launcher.data.shuffle import batch_indices
    from launcher.models.build import build_model

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model: Any = build_model(job.model)
    half = len(model.layers) // 2

    class Front(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = model.embed, model.layers[:half]

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            h = self.embed(tokens)
            for layer in self.layers:
                h = layer(h)
            return h

    class Back(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm, self.head = model.layers[half:], model.norm, model.head

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                h = layer(h)
            return self.head(self.norm(h))

    # one stage per rank, sharded over dp, except parameters that are too small
    stage: Any = Front() if pp == 0 else Back()
    small = {p for p in stage.parameters() if p.numel() * 4 < 64 * 1024}
    kw = {"mesh": mesh["dp"], "reshard_after_forward": False, "ignored_params": small}
    for layer in stage.layers:
        fully_shard(layer, **kw)
    tied = stage.embed if pp == 0 else stage.head
    fully_shard(tied, **kw)
    fully_shard(stage, **kw)
    table = tied.weight
    unsharded = [p for p in stage.parameters() if p in small]
    sharded = [p for p in stage.parameters() if p not in small]
    groups = [{"params": sharded}, {"params": unsharded, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job.optim.lr, betas=(0.9, 0.95), fused=True)
    vocab = job.model.vocab_size

    def loss_fn(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.reshape(-1, vocab), y.reshape(-1))

    schedule = Schedule1F1B(
        PipelineStage(stage, pp, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        plan.sizes.micros,
        loss_fn=loss_fn,
    )

    # the data, and this rank's part of each batch
    source = open_data(job.data, seed=job.seed).train
    n, size = len(source), job.train.batch_size
    part = slice(dp * size // 2, (dp + 1) * size // 2)
    at = 0

    def one() -> float:
        nonlocal at
        mine = batch_indices(job.seed, at, size, n)[part]
        at += 1
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        if pp == 0:
            schedule.step(source.inputs(mine)[0])
        else:
            schedule.step(target=source.targets(mine), losses=losses)

        # gradients of unsharded parameters, and of the table that both stages share
        flat = torch.cat([p.grad.reshape(-1) for p in unsharded])
        dist.all_reduce(flat, group=mesh.get_group("dp"))
        for p, g in zip(unsharded, flat.div_(2).split([p.numel() for p in unsharded]), strict=True):
            p.grad.copy_(g.view_as(p.grad))
        dist.all_reduce(table.grad.to_local(), group=mesh.get_group("pp"))
        grads = [p.grad.to_local() for p in sharded]

        # the norm of all gradients: the tied table counts once, unsharded parameters are on both ranks of dp
        norms = torch.stack(torch._foreach_norm(grads)).square()
        square = norms.sum() - (norms[-1] if pp else 0)
        square += torch.stack(torch._foreach_norm([p.grad for p in unsharded])).square().sum() / 2
        both = torch.stack([sum(losses, torch.zeros(())).detach() / plan.sizes.micros / 2, square])
        dist.all_reduce(both)
        norm = both[1].sqrt().item()
        if norm > 1.0:
            torch._foreach_mul_([*grads, *(p.grad for p in unsharded)], 1.0 / (norm + 1e-6))
        optimizer.step()
        return both[0].item()

    return one


def work(world: World, job: Job, plan: Plan, blocks: int, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds per step of every block, after two blocks that warm up."""
    runs = {"launcher": ours(world, job, plan), "by hand": by_hand(world, job, plan)}
    out: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(blocks + 2):
        for name, one in runs.items():
            began = time.perf_counter()
            for _ in range(steps):
                one()
            if block >= 2:
                out[name].append((time.perf_counter() - began) / steps * 1e3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    job = compose(["recipe=lm_tied_pp2_hsdp2", *args.overrides]).job
    plan = plan_job(job)
    times = run_ranks(partial(work, job=job, plan=plan, blocks=args.blocks, steps=args.steps), 4)[0]
    middle = {name: statistics.median(ms) for name, ms in times.items()}
    for name, ms in times.items():
        spread = f"min {min(ms):.1f}, max {max(ms):.1f}, {len(ms)} blocks of {args.steps}"
        print(f"{name:<9} {middle[name]:7.1f} ms a step  ({spread})")
    pairs = [a / b for a, b in zip(times["launcher"], times["by hand"], strict=True)]
    print(f"ratio     {statistics.median(pairs):7.3f}  (median of {len(pairs)} neighboring pairs)")


if __name__ == "__main__":
    with serving_from_here():
        main()
