"""Builds a rank's live model with its optimizer, data and callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from launcher.checkpoint.cast import Cast, differing
from launcher.checkpoint.foreign.hugging_face import joined, model_type, names_in_folder, read_hf
from launcher.checkpoint.foreign.import_checkpoint import pieces_of_rank
from launcher.checkpoint.full_tensors import Blobs, RenamedTensors
from launcher.checkpoint.layout.derive_strategy import strategy_to_load
from launcher.checkpoint.tensorfile.encryption import load_key
from launcher.data.cifar10_fallback import with_data_read
from launcher.data.file_digests import contents
from launcher.data.open import open_data
from launcher.data.source import Dataset
from launcher.data.torch_datasets.readers import IndexedStream
from launcher.errors import RunError, refuse
from launcher.job import targets
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.job.schema.objective import CrossEntropy
from launcher.job.schema.paths import place
from launcher.job.schema.user_class import Target
from launcher.objective.build import build_loss, build_metrics
from launcher.optim.build import build_optimizer
from launcher.optim.sharded import pieces_of
from launcher.parallel import grad_norm, mesh
from launcher.parallel.grad_norm import watch
from launcher.parallel.local_tensors import local
from launcher.parallel.model_state.variables_read import OutsideChanges, variables_of_loss
from launcher.parallel.parallel_model import ParallelModel, parallelize
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan import outputs_and_targets
from launcher.plan.may_change_on_resume import recorded
from launcher.plan.plan import Plan
from launcher.plan.resolve.checkpoint import streams_misnamed
from launcher.plan.resolve.encryption import Trust, trust
from launcher.plan.values.text import bytes_text
from launcher.planner.plan_job import inputs
from launcher.runtime.cluster.world import World
from launcher.runtime.training import checkpoint_tensors, module_state
from launcher.runtime.training.averaging import WeightAverage
from launcher.runtime.training.batches import Feed
from launcher.runtime.training.changes_between_steps import ChangesBetweenSteps
from launcher.runtime.training.compile_timeout import CompileTimeout
from launcher.runtime.training.loss_scaling import scaling
from launcher.runtime.training.metrics_file import LocalNormLog
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.runtime.training.save_thread import Saver
from launcher.runtime.training.session import Session
from launcher.runtime.training.throughput import RankTimes, device_figures
from launcher.steps.model.build_callbacks import build_callbacks
from launcher.steps.model.same_data import check
from launcher.steps.model.shared_construction import SharedMetaModels


@torch.no_grad()
def load_hf_weights(s: Session, model: HuggingFace) -> None:
    """Replaces the initial weights by those in the folder ``model.path``.

    Raises ``RunError`` for values that the model cannot represent.
    """
    blobs = Blobs(read_hf(Path(model.path)))
    target = strategy_to_load(s.plan, blobs.specs)
    specs = {name: entry.spec for name, entry in target.entries.items()}
    combined = joined(blobs, model_type(Path(model.path)), specs)
    source = RenamedTensors(combined, names_in_folder(combined.specs, target.named))
    expected = {name: target.entries[first].spec for name, first in target.named.items()}
    cast = Cast(source, differing(source.specs, expected))
    mine = {p.name: local(t.detach()) for p, t in s.model.named()}
    size = 0
    try:
        for name, blob in pieces_of_rank(cast, target, s.world.rank):
            checkpoint_tensors.fill(mine[name], blob)
            size += blob.data.nbytes
    except ValueError as error:
        raise RunError(f"model.path: {model.path}: {error}") from error
    checkpoint_tensors.same_copies(s)
    if s.world.rank == 0:
        s.emit({"text": f"loaded the weights of {model.path}; rank 0 has {bytes_text(size)} of them"})


def build(
    world: World,
    job: Job,
    plan: Plan,
    folder: Path,
    data: Dataset | None = None,
    drawn: SharedMetaModels | None = None,
) -> Session:
    """Builds a session with the weights of step 0; every rank calls this.

    ``data``: a data set that is open already; ``drawn``: models constructed before ranks were forked.
    """
    # the model, divided into its stages
    device = torch.device(world.device)
    refuse(streams_misnamed((p.name for p in plan.params), (device.type,)))
    first = CompileTimeout(plan.compilation)
    with first.groups():
        meshes = mesh.build(plan.sizes.grid, device.type, plan.ties, apart=plan.compilation is not None)
    model = parallelize((drawn or SharedMetaModels()).take(job, plan), plan, meshes, device)
    module_state.extra_state_text(model)  # refuse now what no checkpoint can store

    # the samples of this rank
    data = _checked(data or open_data(job.data, seed=job.seed, allow=job.security.allow), job, plan)
    feed = _feed(world, job, plan, data)

    # what else training needs: random states, an optimizer, a loss, a thread that writes checkpoints
    streams = np.random.SeedSequence(plan.seed, spawn_key=(meshes.coords["pp"], feed.part))
    words = streams.generate_state(3)
    torch.manual_seed(int(words[0]))  # for dropout and the like; tp ranks draw the same
    module_state.seed(words[1:])
    optimizer = _optimizer(job, model)
    pipeline = _pipeline(job, model, data, device)
    between = _between(job, model, world)
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
        figures=device_figures(plan, device),
        baseline=data.entropy if job.loss == CrossEntropy() else None,
        local_norm=_local_norm(job, world, model, pipeline, folder=folder),
        callbacks=build_callbacks(job, plan.sizes.steps, world, folder, between),
        between=between,
        average=None if plan.ema is None else WeightAverage(model, plan.ema.decay, plan.ema.every),
        scaling=scaling(plan.dtypes),
        trust=_trust(job),
        settings=_recorded(job, plan, world),
        spare=job.checkpoint.on_error == "continue",
        saver=Saver() if saves_beside else None,
        compile_timeout=first,
        times=RankTimes(world.rank, world.size) if world.size > 1 else None,
    )


def _between(job: Job, model: ParallelModel, world: World) -> ChangesBetweenSteps | None:
    """Returns what examines the callbacks and the schedule; ``None`` if none is the user's."""
    if not job.callbacks and not isinstance(job.schedule, Target):
        return None
    reads = [model.reads]
    if isinstance(job.loss, Target):
        kind = targets.locate(job.loss.target, job.security.allow, object, key="loss._target_")
        reads.append(variables_of_loss(kind))
    modules = [m for part in model.parts for m in part.module.modules()]
    return ChangesBetweenSteps(OutsideChanges(reads, modules), world.size, len(model.plan.stages))


def _optimizer(job: Job, model: ParallelModel) -> Optimizer:
    pieces = pieces_of(model.layouts(), model.meshes.rank, model.meshes.axes)
    return build_optimizer(job.optim, model.param_groups(), job.security.allow, pieces)


def _pipeline(job: Job, model: ParallelModel, data: Dataset, device: torch.device) -> PipelineRuntime:
    allow = job.security.allow
    loss = build_loss(job.loss, allow, device)
    metrics = build_metrics(job.metrics, job.loss, allow, data.token_bytes, device)
    return PipelineRuntime(model, inputs(job, model.plan.sizes.micro_batch), loss, device, metrics)


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
        stream=data.train if isinstance(data.train, IndexedStream) else None,
    )


def _checked(data: Dataset, job: Job, plan: Plan) -> Dataset:
    """Checks that ``data`` fits the plan, and that data in a user's order is the same on all ranks."""
    if data.reading != "shuffled":
        check(data)
    if uneven := outputs_and_targets.uneven_held_out(job, plan, len(data.val)):
        raise RunError(str(uneven))
    return data


def _trust(job: Job) -> Trust:
    """Checks that the key can be read here, as this rank may be on another machine."""
    trusted = trust(job)
    try:
        if trusted.key is not None:
            load_key(trusted.key)
    except ValueError as error:
        raise RunError(f"checkpoint.encrypt: {error}") from error
    return trusted


def _recorded(job: Job, plan: Plan, world: World) -> dict[str, Any]:
    """Returns the settings that a checkpoint records.

    Rank 0 writes them, so only it reads what the data contain.
    """
    job = with_data_read(job)
    return recorded(job, plan, None if world.rank else contents(job.data))


def _local_norm(
    job: Job, world: World, model: ParallelModel, pipeline: PipelineRuntime, folder: Path
) -> LocalNormLog | None:
    """Returns the log of local norms; ``None`` unless requested: gradients are examined only for it."""
    settings = job.parallel.local_norm
    if not settings.print and settings.dump is None:
        return None
    own = watch(model)
    pipeline.before_reduce = own.see_unsharded
    dump = None if settings.dump is None else Path(place(settings.dump, str(folder)))

    # announce it once
    if world.rank == 0:
        outputs = {"printed": settings.print, f"written to {dump}": dump is not None}
        ways = " and ".join(way for way, taken in outputs.items() if taken)
        world.send({"text": f"local_norm is on: norms of each rank's own gradients are {ways}"})
    scale = model.plan.sizes.replicas if model.plan.gradients_mean else 1
    return LocalNormLog(
        own=own,
        world=world,
        emit=world.send,
        print=settings.print,
        dump=dump,
        device=settings.device,
        scale=scale,
    )
