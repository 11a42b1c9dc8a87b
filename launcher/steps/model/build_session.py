"""Builds the live model of one rank with everything that a ``Session`` contains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer

from launcher.checkpoint.tensorfile.keys import load_key
from launcher.data.fallback import with_data_read
from launcher.data.open import open_data
from launcher.data.source import Dataset
from launcher.data.torch_datasets.stream import Stream
from launcher.errors import RunError, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.objectives import CrossEntropy
from launcher.job.schema.run_paths import place
from launcher.objective.build import build_loss, build_metrics
from launcher.optim.build import build_optimizer
from launcher.optim.whole_tensors import pieces_of
from launcher.parallel import mesh
from launcher.parallel.norms import grad_norm
from launcher.parallel.norms.local_grad_norm import watch
from launcher.parallel.parallel_model import ParallelModel, parallelize
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan import sample_checks
from launcher.plan.changed_settings import recorded
from launcher.plan.plan import Plan
from launcher.plan.settings.checkpoint import streams_misnamed
from launcher.plan.values.trust import Trust, trust
from launcher.planner.plan_job import inputs
from launcher.runtime.cluster.world import World
from launcher.runtime.rank_times import RankTimes
from launcher.runtime.training import global_streams, module_state
from launcher.runtime.training.batches import Feed
from launcher.runtime.training.device_figures import figures
from launcher.runtime.training.ema import WeightAverage
from launcher.runtime.training.first_step import FirstStep
from launcher.runtime.training.grad_norm_log import LocalNormLog
from launcher.runtime.training.loss_scaling import scaling
from launcher.runtime.training.pipeline import Pipeline
from launcher.runtime.training.save_thread import Saver
from launcher.runtime.training.session import Session
from launcher.steps.model import same_data, user_callbacks
from launcher.steps.model.shared_construction import Drawings


def build(
    world: World,
    job: Job,
    plan: Plan,
    folder: Path,
    data: Dataset | None = None,
    drawn: Drawings | None = None,
) -> Session:
    """Builds a session with the weights of step 0; every rank calls this.

    ``data``: a data set that is open already; ``drawn``: models constructed before ranks were forked.
    """
    # the model, divided into its stages
    device = torch.device(world.device)
    refuse(streams_misnamed((p.name for p in plan.params), (device.type,)))
    first = FirstStep(plan.compilation)
    with first.groups():
        meshes = mesh.build(plan.sizes.grid, device.type, plan.ties, apart=plan.compilation is not None)
    model = parallelize((drawn or Drawings()).take(job, plan), plan, meshes, device)
    module_state.said(model)  # refuse now what no checkpoint can store

    # the samples of this rank
    data = _checked(data or open_data(job.data, seed=job.seed, allow=job.security.allow), job, plan)
    feed = _feed(world, job, plan, data)

    # other needs of training: random states, a loss, an optimizer, a thread that writes checkpoints
    streams = np.random.SeedSequence(plan.seed, spawn_key=(meshes.coords["pp"], feed.part))
    words = streams.generate_state(3)
    torch.manual_seed(int(words[0]))  # for dropout and the like: each rank has its own
    global_streams.seed(words[1:])
    optimizer = _optimizer(job, model)
    pipeline = _pipeline(job, model, data, device)
    saves_beside = job.checkpoint.asynchronous and job.checkpoint.every is not None
    return Session(
        world=world,
        plan=plan,
        folder=folder,
        model=model,
        pipeline=pipeline,
        optimizer=optimizer,
        norm=grad_norm.build(model),
        feed=feed,
        emit=world.send,
        figures=figures(plan, device),
        baseline=data.entropy if job.loss == CrossEntropy() else None,
        local_norm=_local_norm(job, world, model, pipeline, folder=folder),
        callbacks=user_callbacks.build(job, plan.sizes.steps, world, folder),
        average=None if plan.ema is None else WeightAverage(model, plan.ema.decay, plan.ema.every),
        scaling=scaling(plan.dtypes),
        trust=_trust(job),
        settings=recorded(with_data_read(job), plan),
        spare=job.checkpoint.on_error == "continue",
        saver=Saver() if saves_beside else None,
        first_step=first,
        times=RankTimes(world.rank, world.size) if world.size > 1 else None,
    )


def _optimizer(job: Job, model: ParallelModel) -> Optimizer:
    pieces = pieces_of(model.layouts(), model.meshes.rank, model.meshes.axes)
    return build_optimizer(job.optim, model.param_groups(), job.security.allow, pieces)


def _pipeline(job: Job, model: ParallelModel, data: Dataset, device: torch.device) -> Pipeline:
    allow = job.security.allow
    loss = build_loss(job.loss, allow, device)
    metrics = build_metrics(job.metrics, job.loss, allow, data.token_bytes, device)
    return Pipeline(model, inputs(job, model.plan.sizes.micro_batch), loss, device, metrics)


def _feed(world: World, job: Job, plan: Plan, data: Dataset) -> Feed:
    device = torch.device(world.device)
    return Feed(
        train=data.train,
        val=data.val,
        order=data.order(job.seed),
        plan=plan,
        rank=world.rank,
        device=device,
        floating=dtype_of(plan.dtypes.compute),
        exact=dtype_of(plan.dtypes.kept),
        limit=job.debug.overfit,
        stream=data.train if isinstance(data.train, Stream) else None,
    )


def _checked(data: Dataset, job: Job, plan: Plan) -> Dataset:
    """Checks that ``data`` fits the plan and that user data is the same on all ranks; returns it."""
    if data.reading != "shuffled":
        same_data.check(data)
    if uneven := sample_checks.uneven(job, plan, len(data.val)):
        raise RunError(str(uneven))
    return data


def _trust(job: Job) -> Trust:
    """Checks that the key exists, as this rank may be on another machine."""
    trusted = trust(job)
    try:
        if trusted.key is not None:
            load_key(trusted.key)
    except ValueError as error:
        raise RunError(f"checkpoint.encrypt: {error}") from error
    return trusted


def _local_norm(
    job: Job, world: World, model: ParallelModel, pipeline: Pipeline, folder: Path
) -> LocalNormLog | None:
    """The log of local norms; ``None`` unless requested, so that gradients are not examined."""
    asked = job.parallel.local_norm
    if not asked.print and asked.dump is None:
        return None
    own = watch(model)
    pipeline.before_reduce = own.see_whole
    dump = None if asked.dump is None else Path(place(asked.dump, str(folder)))

    # announce it once
    if world.rank == 0:
        told = {"printed": asked.print, f"written to {dump}": dump is not None}
        ways = " and ".join(way for way, taken in told.items() if taken)
        world.send({"text": f"local_norm is on: norms of each rank's own gradients are {ways}"})
    scale = model.plan.sizes.replicas if model.plan.gradients_mean else 1
    return LocalNormLog(
        own=own, world=world, emit=world.send, print=asked.print, dump=dump, device=asked.device, scale=scale
    )
