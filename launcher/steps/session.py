"""Builds the live model of one rank: everything that ``runtime.session`` holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from launcher.data.open import open_data
from launcher.data.order import batch_indices
from launcher.decide import builder, inputs
from launcher.job.schema import Job
from launcher.models.loss import cross_entropy
from launcher.optim.build import build_optimizer
from launcher.parallel import init, mesh, norm
from launcher.parallel.parallelize import parallelize
from launcher.parallel.read import dtype_of
from launcher.plan.facts import DTYPE
from launcher.plan.plan import Plan
from launcher.runtime.feed import Feed
from launcher.runtime.pipeline import Pipeline
from launcher.runtime.session import Session
from launcher.runtime.world import World


def build(world: World, job: Job, plan: Plan, folder: Path) -> Session:
    """Every rank calls this; the weights are those of step 0."""
    device = torch.device(world.device)
    meshes = mesh.build(plan.sizes.grid, device.type, plan.ties)
    meta, whole = init.record(builder(job), plan)
    specs = inputs(job, plan.sizes.micro_batch)
    model = parallelize(meta, plan, meshes, specs, whole, device)
    pipeline = Pipeline(model, specs, cross_entropy, device)
    at = meshes.coords
    data = open_data(job.data, seed=job.seed, allow=job.security.allow)
    feed = Feed(
        data.train, data.val, partial(batch_indices, job.seed), plan,
        at["dp_replicate"] * plan.sizes.grid["dp_shard"] + at["dp_shard"],
        pipeline.first, pipeline.last, device, dtype_of(DTYPE[plan.precision]), job.debug.overfit,
    )  # fmt: skip
    streams = np.random.SeedSequence(plan.seed, spawn_key=(at["pp"], feed.part))
    torch.manual_seed(int(streams.generate_state(1)[0]))  # of dropout, say: each rank has its own
    optimizer = build_optimizer(job.optim, model.trainable(), job.security.allow)
    return Session(world, plan, folder, model, pipeline, optimizer, norm.build(model), feed, world.send, data.entropy)
