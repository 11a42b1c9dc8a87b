"""Lower bounds of a layout's seconds and bytes, computed without a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from launcher.extras.layout_search.candidates import LayoutCandidate
from launcher.job.schema.job import Job
from launcher.job.schema.search import AUTO
from launcher.plan import recompute_auto
from launcher.plan.plan import Plan
from launcher.plan.schedule.schedules import RULES
from launcher.plan.time.prediction import collectives
from launcher.plan.time.speeds import Speeds, together
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.text import GB


@dataclass(frozen=True)
class ModelCost:
    """The full model on one rank of ``tp``: seconds and bytes of a micro batch of one sample.

    ``device``: seconds of its kernels; ``again``: those of a forward; ``late``: those of the part of a
    backward that may be postponed. ``sent``: seconds on the links between tp ranks. ``host``: seconds to
    launch the kernels, however many samples there are. ``saved``: bytes that a forward saves for its
    backward; ``handed``: bytes that a stage sends to the next. ``params``, ``optimizer``: bytes as stored;
    ``low``: the bytes of the compute dtype as a share of ``params``. ``blocks``: the number of equal blocks;
    ``block``: one block's share of all seconds; ``head``: the share of what follows the last block.
    ``grows``: the seconds of each further sample relative to those of the first, as small kernels are slow.
    """

    device: float
    again: float
    late: float
    sent: float
    host: float
    saved: int
    handed: int
    keeps_messages: bool
    params: int
    optimizer: int
    low: float
    blocks: int
    block: float
    head: float
    batch_dependent: bool
    grows: float = 1.0

    def slowest(self, stages: int) -> float:
        """Returns the least fraction of work on the slowest rank.

        Blocks are not divided, and one rank has the head.
        """
        if stages == 1:
            return 1.0
        last = range(self.blocks + 1)
        others = (-(-(self.blocks - n) // (stages - 1)) for n in last)
        share = min(
            max(n * self.block + self.head, m * self.block) for n, m in zip(last, others, strict=True)
        )
        return max(1 / stages, share)

    def samples(self, n: int) -> float:
        """Returns how many times longer ``n`` samples take than one."""
        return 1 + (n - 1) * self.grows


def model_cost(plan: Plan, speeds: Speeds, keeps_messages: bool) -> ModelCost:
    """Measures a plan with micro batches of one sample, unsharded weights and no recomputation."""
    work, grid = plan.estimate.work, plan.sizes.grid
    memory = plan.estimate.memory
    rows = [memory[grid.ranks(pp=pp)[0]] for pp in range(grid["pp"])]
    trained = [p for p in plan.params if p.trainable] or list(plan.params)
    backward = sum(speeds.device_seconds(s.backward.kernels, True) for s in work.stages)
    forward = sum(speeds.device_seconds(s.forward.kernels) for s in work.stages)
    passes = [one for s in work.stages for one in (s.forward, s.backward)]
    blocks = recompute_auto.blocks(plan)
    block, head = _shares(plan, blocks, speeds)
    return ModelCost(
        device=forward + backward,
        again=forward,
        late=sum(speeds.device_seconds(s.late, True) for s in work.stages),
        sent=sum(collectives(one.sent, grid.peers(0, "tp"), speeds) for one in passes),
        host=sum(speeds.host_seconds(one.kernels.kernels) for one in passes),
        saved=sum(s.saved for s in work.stages),
        handed=min(work.crossings, default=0),
        keeps_messages=keeps_messages,
        params=sum(m.params for m in rows),
        optimizer=sum(m.optimizer for m in rows),
        low=min(ITEMSIZE[p.compute] / ITEMSIZE[p.spec.dtype] for p in trained),
        blocks=len(blocks),
        block=block,
        head=head,
        batch_dependent=plan.observed.batch_dependent,
    )


def growth(one: Plan, two: Plan, speeds: Speeds) -> float:
    """Returns ``ModelCost.grows``, from plans with micro batches of one and two samples; growth is linear."""
    first, second = (_device(plan, speeds) for plan in (one, two))
    return min(1.0, max(0.0, second - first) / max(first, 1e-12))


def _device(plan: Plan, speeds: Speeds) -> float:
    stages = plan.estimate.work.stages
    backward = sum(speeds.device_seconds(s.backward.kernels, True) for s in stages)
    return backward + sum(speeds.device_seconds(s.forward.kernels) for s in stages)


def _shares(plan: Plan, blocks: Sequence[str], speeds: Speeds) -> tuple[float, float]:
    """Returns ``ModelCost.block`` and ``ModelCost.head``; zeros if blocks differ or one stage has all."""
    stages = [one.passes[0].segments for load in plan.estimate.loads for _, one in load.stages]
    saved = {s.saved for segments in stages for s in segments if s.module in blocks}
    each = [sum(m in blocks for m in stage.modules) for stage in plan.stages]
    if len(saved) != 1 or len(each) == 1 or not all(each):
        return 0.0, 0.0
    work = plan.estimate.work.stages
    took = [
        speeds.device_seconds(s.forward.kernels) + speeds.device_seconds(s.backward.kernels, True)
        for s in work
    ]
    block = min(seconds / n for seconds, n in zip(took, each, strict=True))
    return block / sum(took), (took[-1] - each[-1] * block) / sum(took)


@dataclass(frozen=True)
class Bound:
    """An approximate lower bound for a layout whose stages are as equal as undivided blocks permit.

    ``pipeline``: seconds until the last action ends; ``forward``: those of all forwards in it; ``rest``:
    seconds of what follows. Bytes: ``states``; what is ``kept`` for backwards; the part of it that is
    ``handed`` to other stages and so cannot be recomputed; ``room``: the most that all may take, if blocks
    are recomputed until they fit.
    """

    pipeline: float
    forward: float
    rest: float
    states: float
    kept: float
    handed: float
    room: float | None

    def seconds(self, uneven: Imbalance, policies: Policies, margin: float) -> float:
        """Returns the seconds for pipelines with this imbalance, times ``margin``.

        It is ``inf`` if the layout does not fit.
        """
        again = min(self.again(uneven, policies).values(), default=0.0)
        return margin * uneven.seconds * (self.pipeline + again * self.forward) + self.rest

    def again(self, uneven: Imbalance, policies: Policies) -> dict[str, float]:
        """Returns the fraction of the forwards that each policy must recompute so that the layout fits."""
        if self.room is None:
            return {}
        kept = self.kept * uneven.bytes
        need = max(0.0, self.states + kept - self.room) / max(kept - self.handed, 1.0)
        return {policy: min(_again(need, *one) for one in seen) for policy, seen in policies.items()}

    def uneven(self, pipeline: float, nbytes: int) -> Imbalance:
        """Returns the imbalance of the layout's plan, from its pipeline seconds and its bytes.

        The bytes are those without recomputation.
        """
        seconds = max(1.0, pipeline / self.pipeline)
        return Imbalance(seconds, max(1.0, (nbytes - self.states) / max(self.kept, 1.0)))

    @property
    def nbytes(self) -> float:
        """The fewest bytes, whatever is recomputed."""
        return self.states + (self.kept if self.room is None else min(self.kept, self.handed))


@dataclass(frozen=True)
class Imbalance:
    """How many times longer a pipeline takes than an even one, and how much more its fullest rank keeps."""

    seconds: float = 1.0
    bytes: float = 1.0


def bound(layout: LayoutCandidate, of: ModelCost, speeds: Speeds, job: Job) -> Bound:
    """Returns the bound.

    It leaves out what only a plan knows: transfers, uneven stages, an allocator near its limit.
    """
    costs = speeds.cluster.overheads
    alone = speeds.cluster.kernels.alone if speeds.cores is not None else 1.0  # the other ranks may be idle
    times = of.samples(layout.micro)
    device = times * (of.device + costs.exposed_tp * of.sent)
    share = of.slowest(layout.stages)
    slots = 2 * layout.chunks * costs.slot_ms / 1e3
    one = (together(device, of.host) * share + slots) / alone
    states, kept, handed = _bytes(layout, of)
    shard = 1 if layout.hsdp is None else layout.hsdp.shard_size
    state = (3 * of.params + 2 * of.optimizer) / (layout.stages * shard) / speeds.memory
    gb = job.cluster.memory_gb
    return Bound(
        pipeline=layout.micros * one + _fill(layout, of, one),
        forward=layout.micros * times * of.again * share / alone,
        rest=(_network(layout, of, speeds) + state + costs.step_ms / 1e3) / alone,
        states=states,
        kept=kept,
        handed=handed,
        room=gb * GB if gb is not None and layout.recompute.startswith(AUTO) else None,
    )


Effect = tuple[float, float]
"""The fraction of a forward's saved bytes that a policy frees, and of the forward that it recomputes."""
Policies = Mapping[str, tuple[Effect, ...]]
"""The effects of each policy in the plans so far."""
UNSEEN: Policies = {"selective": ((0.6, 0.25),), "full": ((1.0, 1.0),)}
"""Optimistic effects, until a plan shows the real ones: much is freed for little work."""
FAR, NEAR = 0.95, 0.985
"""Margins for seconds that are derived from other layouts: with another pipeline, and within a family."""
CLOSE = 1.15
"""A policy that recomputes more than this many times what another does is not tried."""
TOO_MUCH = 1.05
"""A layout does not fit if a policy would have to free more than this many times what it can free."""


def _again(need: float, freed: float, costs: float) -> float:
    """Returns the fraction of a forward to recompute.

    Then the fraction ``need`` of its saved bytes is freed.
    """
    share = need / max(freed, 1e-9)
    return min(share, 1.0) * costs if share < TOO_MUCH else inf


def _fill(layout: LayoutCandidate, of: ModelCost, one: float) -> float:
    """Returns the seconds in which the pipeline fills and drains.

    ``one``: those of a micro batch on one stage.
    """
    stages = layout.stages - 1
    if RULES[layout.scheduler].v:
        return 0.0
    if RULES[layout.scheduler].split:
        return stages * max(0.0, one * (1 - 2 * of.late / max(of.device, 1e-12)))
    return stages * one / layout.chunks


def _bytes(layout: LayoutCandidate, of: ModelCost) -> tuple[float, float, float]:
    """Returns the bytes of an average rank: states, what is kept for backwards, and the part always kept."""
    hsdp, stages, chunks = layout.hsdp, layout.stages, layout.chunks
    shard = 1 if hsdp is None else hsdp.shard_size
    states = (of.params + of.optimizer + of.low * of.params) / shard  # with gradients
    if hsdp is not None and hsdp.optimizer_level != "level3":
        states += of.low * of.params

    # micro batches in flight on the first rank, counted once per chunk
    ahead = min(stages, layout.micros) * chunks
    if chunks > 1:
        ahead = min(layout.micros * chunks, stages * (chunks - 1) + 2 * stages - 1)
    kept = ahead / (stages * chunks) * layout.micro * of.saved
    handed = (min(stages, layout.micros) if stages > 1 else 0) * layout.micro * of.handed
    if of.keeps_messages and stages > 1:
        handed = 2 * layout.micros * layout.micro * of.handed
        kept += handed
    return states / stages, kept, handed


def _network(layout: LayoutCandidate, of: ModelCost, speeds: Speeds) -> float:
    """Returns the seconds of an average rank's collectives for gradients and weights."""
    if layout.replicas == 1:
        return 0.0
    costs = speeds.cluster.overheads
    nbytes = of.low * of.params / layout.stages
    copies = range(0, layout.replicas * layout.tp, layout.tp)
    if layout.hsdp is None:
        return costs.exposed_sums * 2 * _stream(nbytes, copies, speeds)
    level = layout.hsdp.optimizer_level
    gathers = 2 * layout.micros if level == "level3" else 1
    scatters = 1 if level == "level1" else layout.micros
    shards = copies[: layout.hsdp.shard_size]
    return costs.exposed * (gathers + scatters) * _stream(nbytes, shards, speeds)


def _stream(nbytes: float, ranks: Sequence[int], speeds: Speeds) -> float:
    """Returns the seconds around a ring.

    The latency of collectives is left out: only a plan knows how many there are.
    """
    _, rate = speeds.ring(ranks)
    return (len(ranks) - 1) / len(ranks) * nbytes / rate
