"""``certify``: trains a copy of the run in its layout and in one process; all numbers must agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn

from launcher.checkpoint.export_one_file import export
from launcher.checkpoint.tensorfile.disk import discard, write_text
from launcher.data.open import open_data
from launcher.data.source import Dataset
from launcher.errors import RunError
from launcher.job.schema import steps
from launcher.job.schema.job import Job
from launcher.parallel.deferred_init import compare_builds, constructor, fill
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.dispatch.training_mode import is_dropout
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.certify_copy import MORE, Copy
from launcher.plan.certify_copy import copies as copies_of
from launcher.plan.plan import Plan
from launcher.plan.values.precision import DTYPE
from launcher.planner import user_classes
from launcher.planner.plan_job import builder, plan_like
from launcher.runtime.cluster.messages import broadcast, gather, gather_tensors
from launcher.runtime.cluster.world import World
from launcher.runtime.device import forked_streams
from launcher.runtime.training import checkpoint_tensors, loop, save
from launcher.runtime.training.batches import Feed, Indices
from launcher.runtime.training.session import Session
from launcher.steps import train
from launcher.steps.certification.certificate import Certificate, as_json, verdict
from launcher.steps.certification.compare import Judge, Piece, full_tensors_on_rank_0, pieces
from launcher.steps.certification.oracle.equal_draws import EqualDraws
from launcher.steps.certification.oracle.samples import First, Narrow, ReferenceSamples, held_out
from launcher.steps.certification.process_states import ProcessStates
from launcher.steps.model import build_session
from launcher.steps.model.shared_construction import SharedMetaModels

FILE = "certificate.json"
FOLDER = "certify"
EXPORTED = "exported.safetensors"
BUILDS = 2
"""The number of models that are built for each copy: one is trained, the other loads its checkpoint."""
HALF = 0.5
"""The clipping limit as a fraction of the first step's norm, so that gradients are clipped."""


def copies(step: steps.Certify, job: Job, plan: Plan) -> tuple[tuple[Copy, Plan], ...]:
    """Returns copies of ``job`` to train one after the other, each with its plan."""
    engine = plan.sizes.engine
    return tuple(
        (copy, plan_like(copy.job, None, engine=engine)) for copy in copies_of(job, step, plan.sizes)
    )


def run_copies(
    step: steps.Certify,
    world: World,
    copies: Sequence[tuple[Copy, Plan]],
    folder: Path,
    drawn: SharedMetaModels,
) -> str:
    """Writes ``certificate.json``; returns the verdict.

    Raises ``RunError`` on every rank if the certificate does not hold. Stops at the first precision that
    fails.
    """
    job = copies[0][0].job
    # opened once, because training a tokenizer takes long
    data = open_data(job.data, seed=job.seed, allow=job.security.allow)

    # only rank 0 has certificates; all ranks learn whether to continue
    done: list[tuple[Certificate, Copy, Plan]] = []
    for copy, plan in copies:
        certificate = examine(world, copy, plan, folder, data=data, drawn=drawn)
        if certificate is not None:
            done.append((certificate, copy, plan))
        if not _agreed(bool(done) and done[-1][0].holds):
            break

    summary = ""
    if done:
        write_text(folder / FILE, as_json(done, world.device))
        summary = verdict([c for c, _, _ in done])
    summary = str(broadcast(summary, str))
    if not _agreed(all(c.holds for c, _, _ in done)):
        raise RunError(f"the certificate {summary}; all errors are in {folder / FILE}")
    return summary


def examine(
    world: World, copy: Copy, plan: Plan, folder: Path, data: Dataset, drawn: SharedMetaModels | None = None
) -> Certificate | None:
    """Trains ``copy`` in its layout and in one process; rank 0 compares them and returns the result.

    Restores random states at the end. The last step but one uses samples that leave experts idle; the last
    step follows a save and a load.
    """
    device, job = torch.device(world.device), copy.job
    setup = Setup(
        world=world,
        job=job,
        plan=plan,
        folder=folder / FOLDER / job.train.precision,
        data=data,
        judge=Judge(copy, plan, data, device, prepare=_undropped) if world.rank == 0 else None,
        drawn=drawn or SharedMetaModels(),
        names=tuple(user_classes.files(job)),
    )
    with forked_streams(device):
        _compare(setup, plan.sizes.steps - MORE)
    judge = setup.judge
    if judge is None:
        return None

    # all ranks have continued training, so they have read the files
    discard(folder / FOLDER)
    return Certificate(tuple(judge.findings), copy.tolerance, job.train.precision)


@dataclass(frozen=True)
class Setup:
    """The copy that ``certify`` trains on one rank; only rank 0 has a ``judge``.

    ``names``: the Python modules of a user's model.
    """

    world: World
    job: Job
    plan: Plan
    folder: Path
    data: Dataset
    judge: Judge | None
    drawn: SharedMetaModels
    names: tuple[str, ...]


def _compare(s: Setup, steps: int) -> None:
    """Runs the steps; stops early if weights are wrong at step 0, or if a step is not finite."""
    live, judge = _live(s), s.judge
    processes = ProcessStates(s.names)
    start, others = full_tensors_on_rank_0(s.plan, pieces(live.model, weights=True)), _others(live)
    if judge and start:
        judge.start(start, others, _constructed(s), processes, partial(s.drawn.restart, s.job))
    if not _agreed(judge is None or judge.agrees):
        return

    # ordinary steps, one with idle experts, one after a save and a load; the validation comes last, because
    # its forward, and its padding, may change buffers
    live.scaling.factor = broadcast(judge.scale(live.scaling.factor) if judge else 0.0, float)
    drawing, clip = _agreed(judge is not None and judge.draws()), None
    if not _agreed(judge is None or judge.agrees):
        return
    _draw_alike(live, drawing)
    try:
        while live.step < steps:
            norm = _step(live, s, clip)
            clip = clip or _clip(s.job, norm)
        _step(live, s, clip, broadcast(judge.narrow() if judge else None, Narrow | None))
        live = _again(live, s)
        processes.restart()
        _draw_alike(live, drawing)
        _next_batch(live, judge)
        _look(live)
        _step(live, s, clip)
        _next_batch(live, judge)
        _next_epoch(live, judge)
        _validate(live, judge, full_micro_batches=drawing)
    except _NoNumbers:
        return


def _constructed(s: Setup) -> Mapping[str, Tensor]:
    """Returns the tensors of a plain construction with the random draws of the weights at step 0."""
    build, seed = builder(s.job), s.plan.seed
    with s.drawn.as_first(s.job), default_dtype(dtype_of(DTYPE[s.plan.precision])):
        if s.plan.deferred:
            return compare_builds.plain_tensors(build, seed)
        return fill.tensors(constructor.build_in_memory(build, seed))


class _NoNumbers(Exception):
    """A step was not finite in the layout but was in one process; the judge has recorded it."""


def _agreed(value: bool) -> bool:
    """Returns rank 0's ``value``, on all ranks."""
    return bool(broadcast(value, bool))


def _live(s: Setup) -> Session:
    """Returns a new session without dropout, whose reports are discarded."""
    live = build_session.build(s.world, s.job, s.plan, s.folder, data=s.data, drawn=s.drawn)
    live.emit = lambda row: None
    undropped(part.module for part in live.model.parts)
    return live


def _draw_alike(live: Session, drawing: bool) -> None:
    """Makes this rank draw the same values as ``ReferenceTraining`` in one process."""
    if drawing:
        live.pipeline.around = EqualDraws


def _undropped(model: nn.Module) -> None:
    undropped([model])


def undropped(modules: Iterable[nn.Module]) -> None:
    """Disables torch's dropout modules; other random draws are made equal."""
    for m in (m for module in modules for m in module.modules() if is_dropout(m)):
        if isinstance(m, nn.MultiheadAttention):
            m.dropout = 0.0
        else:
            m.p = 0.0  # type: ignore[assignment]


def _others(live: Session) -> Mapping[str, Tensor]:
    """Returns the buffers that no checkpoint contains, as this layout drew them.

    On all ranks but rank 0 the result is empty.
    """
    known = {n for p in live.plan.params for n in p.names}
    mine = {
        name: b.detach().cpu()
        for part in live.model.parts
        for name, b in part.module.named_buffers(remove_duplicate=False)
        if name not in known and not b.is_meta
    }
    every = gather_tensors(mine)
    return {name: t for tensors in reversed(every or []) for name, t in tensors.items()}


def _clip(job: Job, norm: float) -> float | None:
    """Returns the clipping limit of all steps but the first, whose gradients are compared unclipped."""
    limit = job.train.clip_norm
    return None if limit is None else broadcast(min(limit, norm * HALF) or limit, float)


def _step(live: Session, s: Setup, clip: float | None, narrow: Narrow | None = None) -> float:
    """Runs one optimizer step of the real loop; rank 0 returns its gradient norm."""
    # capture gradients before the optimizer uses them, and figures when they are emitted
    grad_pieces: list[Piece] = []
    hook = live.optimizer.register_step_pre_hook(lambda *_: grad_pieces.extend(pieces(live.model)))
    rows: list[Mapping[str, Any]] = []
    live.emit = rows.append
    scale, feed, judge = live.scaling.factor, live.feed, s.judge
    if narrow is not None:
        live.feed = _narrowed(feed, narrow, s.plan.sizes.local_batch)
    try:
        loop.train(
            live, replace(train.loop_settings(live, s.job), until=live.step + 1, clip=clip, log_every=1)
        )
    except RunError as error:  # raised on every rank
        if _agreed(judge is not None and judge.failed(str(error), scale, narrow)):
            raise _NoNumbers from error
        raise
    live.feed = feed
    hook.remove()

    # compare with one process
    grads = full_tensors_on_rank_0(s.plan, grad_pieces)
    weights = full_tensors_on_rank_0(s.plan, pieces(live.model, weights=True))
    means = full_tensors_on_rank_0(s.plan, _averages(live))
    if judge is None or grads is None or weights is None or means is None:
        return 0.0
    row = next((r for r in rows if "loss" in r), {})
    judge.step(row, grads, clip, scale=scale, narrow=narrow)
    judge.update(grads, weights, means)
    return float(row.get("grad_norm", 0.0))


def _averages(live: Session) -> list[Piece]:
    """Returns this rank's shards of the moving average of the weights, if there is one."""
    averages = [] if live.average is None else live.average.named()
    rank = live.world.rank
    shards = [(p.name, p.layout.box(rank), mean) for p, mean in averages]
    return [
        Piece(name, rank, box, mean.to("cpu", copy=True)) for name, box, mean in shards if box is not None
    ]


def _narrowed(feed: Feed, narrow: Narrow, local: int) -> Feed:
    """Returns ``feed`` with the samples of ``narrow``; ``local``: the number of samples in a rank's batch."""

    def order(step: int, batch: int, n: int) -> Indices:
        return narrow.order(feed.order(step, batch, n), local)

    return replace(feed, train=narrow.view(feed.train), order=order)


def _validate(live: Session, judge: Judge | None, full_micro_batches: bool) -> None:
    """Validates on held-out samples that do not fill the last batch.

    ``full_micro_batches``: the samples fill micro batches, whose shape determines what a forward draws. They
    also do if a module normalizes over the samples of a micro batch in evaluation mode. Otherwise the last
    micro batch is padded, and padding must not matter. Does nothing for a model whose output depends on state
    that an earlier evaluation has changed: no two layouts of it agree.
    """
    feed, sizes = live.feed, live.plan.sizes

    def some(samples: ReferenceSamples) -> ReferenceSamples:
        validation = held_out(samples, sizes.global_batch)
        return (
            First(samples, len(validation) - len(validation) % sizes.micro_batch)
            if full_micro_batches or live.plan.observed.mixed
            else validation
        )

    if len(some(feed.val)) and not live.plan.observed.unsteady:
        live.feed = replace(feed, val=some(feed.val))
        loss = loop.validate(live, None)
        averaged = None
        if live.average is not None:
            with live.average.in_place():
                averaged = loop.validate(live, None)
        live.feed = feed
        if judge:
            judge.validation(loss, some)
        if judge and averaged is not None:
            judge.average_validation(averaged, some)


def _again(live: Session, s: Setup) -> Session:
    """Saves a checkpoint, loads it into a new model of the same layout, and lets the judge compare."""
    saved, factor = save.save_unchecked(live, None), live.scaling.factor
    del live
    new = _live(s)
    new.scaling.factor = factor
    checkpoint_tensors.load(new, saved)
    got = full_tensors_on_rank_0(s.plan, pieces(new.model, weights=True))
    if s.judge and got:
        s.judge.loaded(got, _exported(saved, s.folder / EXPORTED, new))
    return new


def _exported(saved: Path, path: Path, live: Session) -> Mapping[str, Tensor]:
    """Returns the tensors of an export of ``saved``.

    The safetensors library reads them, because the writer is our own.
    """
    export(saved, path, live.trust)
    return load_file(path)


def _look(live: Session) -> None:
    """Runs validations before a step, which must not affect the step."""
    if len(live.feed.val) and not live.plan.observed.unsteady:
        loop.validate(live, 1)
        if live.average is not None:
            with live.average.in_place():
                loop.validate(live, 1)


def _next_epoch(live: Session, judge: Judge | None) -> None:
    """Compares what every rank would read an epoch later with the reference, unless the data is a stream."""
    if live.feed.stream is None:
        _next_batch(
            live, judge, ceil(len(live.feed.train) / live.plan.sizes.global_batch), " in the next epoch"
        )


def _next_batch(live: Session, judge: Judge | None, ahead: int = 0, when: str = "") -> None:
    """Compares what every rank would read next, or ``ahead`` steps later, with the reference."""
    batch, sizes = live.feed.batch(live.step + ahead), live.plan.sizes
    ins = digest(batch.inputs) if batch.inputs else ""
    out = "" if batch.targets is None else digest([batch.targets])
    every = gather((live.feed.part, ins, out), tuple[int, str, str])
    if judge and every:
        xs, y = judge.training.batch(judge.done + ahead)
        for rank, (part, got_in, got_out) in enumerate(every):
            mine = slice(part * sizes.local_batch, (part + 1) * sizes.local_batch)
            same = got_in in ("", digest([x[mine] for x in xs])) and got_out in ("", digest([y[mine]]))
            judge.samples(rank, same, when)


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a 128-bit hash of the values, in order."""
    hasher = xxhash.xxh3_128()
    for t in tensors:
        hasher.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
