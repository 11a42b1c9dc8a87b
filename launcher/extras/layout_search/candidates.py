"""The layouts that a request leaves open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import CommFusion, Grid, Hsdp, Network, Recompute
from launcher.job.schema.search import AUTO, Search
from launcher.plan.schedule.schedules import RULES
from launcher.plan.time.speeds import Speeds
from launcher.plan.values.grid import divisors
from launcher.plan.values.text import many

PIPELINE = "parallel.pipeline"
RECOMPUTE = "parallel.recompute"
KEYS = {
    "tp": "parallel.grid.tp",
    "operators": "parallel.operators",
    "stages": f"{PIPELINE}.stages",
    "scheduler": f"{PIPELINE}.scheduler",
    "chunks": f"{PIPELINE}.chunks",
    "micros": f"{PIPELINE}.micro_batch_num",
    "hsdp": "parallel.hsdp",
    "recompute": RECOMPUTE,
}
"""The setting of each field."""


TpChoice = tuple[int, str]
"""The number of tp ranks, and the name of the operator strategies that use them."""


TraceKey = tuple[TpChoice, int, bool]
"""Everything that a traced forward depends on: the cut, samples per micro batch, if it is one stage."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that the search may choose.

    ``replicas``: the number of data-parallel ranks; ``micro``: samples per micro batch.

    ``operators`` and ``recompute`` name candidates; ``chunks`` 1 means one stage per rank.
    """

    tp: int
    operators: str
    stages: int
    scheduler: str
    chunks: int
    micros: int
    hsdp: Hsdp | None
    recompute: str
    replicas: int
    micro: int

    @property
    def order(self) -> tuple[Any, ...]:
        """A sort key for layouts that are equally good: the simpler one first."""
        sharing = ("", 0) if self.hsdp is None else (self.hsdp.optimizer_level, self.hsdp.shard_size)
        plain = (self.stages, self.tp, self.operators, self.chunks, self.scheduler)
        return (*plain, sharing, self.recompute, self.micros)

    @property
    def cut(self) -> TpChoice:
        return self.tp, self.operators

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """What determines the pipeline's bubble."""
        return self.scheduler, self.stages, self.chunks, self.micros

    def shown(self) -> dict[str, str]:
        """Returns the value of each setting as a user types it, by field name."""
        sharing = "none"
        if self.hsdp is not None:
            sharing = f"{self.hsdp.optimizer_level}/{self.hsdp.shard_size}"
        values = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name in KEYS}
        return values | {"hsdp": sharing}


@dataclass(frozen=True)
class Candidates:
    """The settings behind the names of candidates."""

    operators: Mapping[str, Any]
    recompute: Mapping[str, Recompute | None]


def job_of(job: Job, layout: LayoutCandidate, named: Candidates, speeds: Speeds | None = None) -> Job:
    """Returns ``job`` in this layout; ``speeds``: the network to which sizes of collectives are fitted."""
    par = job.parallel
    pipe = par.pipeline.model_copy(
        update={
            "stages": layout.stages,
            "scheduler": layout.scheduler,
            "interleave": layout.chunks > 1,
            "chunks": max(2, layout.chunks),
            "micro_batch_num": layout.micros,
        }
    )
    settings: dict[str, Any] = {
        "pipeline": pipe,
        "grid": Grid(tp=layout.tp),
        "operators": named.operators[layout.operators],
        "hsdp": layout.hsdp,
        "recompute": named.recompute[layout.recompute],
    }
    if speeds is not None and layout.replicas > 1:
        settings["comm_fusion"] = fitted(par.comm_fusion, layout, speeds)
    return job.model_copy(update={"parallel": par.model_copy(update=settings), "search": Search()})


def fitted(fusion: CommFusion, layout: LayoutCandidate, speeds: Speeds) -> CommFusion:
    """Adds the latency and bandwidth of the data-parallel ring."""
    latency, rate = speeds.ring(range(0, layout.replicas * layout.tp, layout.tp))
    network = Network(latency_us=max(latency * 1e6, 1e-3), gb_per_s=rate / 1e9)
    return fusion.model_copy(update={"network": network})


STAGES, TP, MICROS = "parallel.pipeline.stages", "parallel.grid.tp", "parallel.pipeline.micro_batch_num"
SCHEDULER, INTERLEAVE = "parallel.pipeline.scheduler", "parallel.pipeline.interleave"
CHUNKS, HSDP, OPERATORS = "parallel.pipeline.chunks", "parallel.hsdp", "parallel.operators"
SHARD, LEVEL, RECOMPUTE = "parallel.hsdp.shard_size", "parallel.hsdp.optimizer_level", "parallel.recompute"
LEVELS = ("level1", "level2", "level3")
SCHEDULERS = ("1f1b", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
"""The schedulers that auto stands for.

gpipe takes as long as 1f1b and keeps more; the seq* schedulers divide sequences.
"""
MOST_CHUNKS = 8
AS_REQUESTED = "as requested"
"""The name of the only candidate of a setting that is not searched."""


@dataclass
class SearchSpace:
    """The possible ``layouts`` of a request, and the number of the others by reason."""

    layouts: list[LayoutCandidate]
    named: Candidates
    out: Counter[str] = field(default_factory=Counter)


def space(job: Job) -> SearchSpace:
    """Returns all layouts that ``search.over`` leaves open; other settings keep their values."""
    open_ = _Open(job)
    named = Candidates(open_.operators(), open_.recompute())
    search_space = SearchSpace([], named)
    for tp in open_.tps():
        for operators in open_.operators_of(tp, named.operators, search_space.out):
            for stages in open_.stages(tp):
                for layout in _of_grid(open_, tp, operators, stages, search_space):
                    search_space.layouts.append(layout)
    return search_space


def _of_grid(
    open_: _Open, tp: int, operators: str, stages: int, space: SearchSpace
) -> Iterator[LayoutCandidate]:
    """Yields the layouts with these degrees of tp and pipeline stages."""
    world, batch = open_.world, open_.job.train.batch_size
    if world % (stages * tp):
        space.out[f"{many(world, 'rank')} cannot be divided evenly into {stages} x {tp}"] += 1
        return
    replicas = world // (stages * tp)
    if batch % replicas:
        space.out[
            f"train.batch_size {batch} cannot be divided evenly over {replicas} data-parallel ranks"
        ] += 1
        return
    local = batch // replicas
    for micros in open_.micros(stages, local, space.out):
        for scheduler, chunks in open_.schedules(stages):
            rule = RULES[scheduler]
            if rule.full and micros < 2 * stages:
                space.out[f"fewer micro batches than virtual stages, which {scheduler} needs"] += 1
                continue
            for hsdp in open_.sharing(replicas):
                if rule.split and hsdp is not None and _dropped(hsdp):
                    space.out[f"level3 drops weights before {scheduler} computes their gradients"] += 1
                    continue
                for recompute in space.named.recompute:
                    pipe = (stages, scheduler, chunks, micros)
                    yield LayoutCandidate(tp, operators, *pipe, hsdp, recompute, replicas, local // micros)


def _dropped(hsdp: Hsdp) -> bool:
    """Returns true if weights are freed after a forward."""
    return hsdp.optimizer_level == "level3" and hsdp.shard_size > 1


def impossible(job: Job) -> list[Problem]:
    """Returns why a request cannot be searched; needs neither torch nor a model."""
    over = job.search.over
    problems = []
    if job.cluster.links is None:
        text = "layouts are compared by the speed of the devices, which is unknown"
        problems.append(Problem("cluster", text, "cluster=h100_sxm"))
    if job.launch.nproc is None:
        text = "null: a search needs the number of ranks"
        problems.append(Problem("launch.nproc", text, "launch.nproc=8"))
    par = job.parallel
    sums = {
        "parallel.pipeline.loss_reduction": (par.pipeline.loss_reduction == "sum", "sum", "mean"),
        "parallel.gradients_mean": (not par.gradients_mean, "false", "true"),
        "parallel.loss_repeated_mean": (not par.loss_repeated_mean, "false", "true"),
    }
    for key, (wrong, value, cure) in sums.items():
        if wrong:
            text = f"{value}: the size of a step would depend on the layout that is chosen"
            problems.append(Problem(key, text, f"{key}={cure}"))
    if over.get(OPERATORS) == AUTO:
        problems.append(
            Problem(OPERATORS, "auto: only a request composed from conf/ has options of operators to try")
        )
    return problems


class _Open:
    """The values of each setting that ``job`` allows."""

    def __init__(self, job: Job) -> None:
        assert job.launch.nproc is not None
        self.job = job
        self.over: Mapping[str, Any] = job.search.over
        self.a_node = job.launch.nproc
        self.world = job.launch.nproc * job.launch.nnodes

    def _values(self, key: str, auto: Sequence[Any], requested: Any) -> list[Any]:
        return _values(self.over, key, auto, requested)

    def tps(self) -> list[int]:
        """Returns degrees of tp within a node, whose links are the fast ones."""
        requested = self.job.parallel.grid.tp or 1
        return self._values(TP, divisors(self.a_node), requested)

    def operators(self) -> Mapping[str, Any]:
        choices = self.over.get(OPERATORS)
        return {AS_REQUESTED: self.job.parallel.operators} if choices is None else choices

    def operators_of(self, tp: int, named: Mapping[str, Any], out: Counter[str]) -> Iterator[str]:
        """Yields candidates that shard something if ``tp`` > 1, else one candidate that shards nothing."""
        if tp == 1 and len(named) > 1:
            yield min(named, key=lambda name: (bool(named[name]), name))
            return
        for name, cut in named.items():
            if tp > 1 and not cut and len(named) > 1:
                continue
            yield name

    def stages(self, tp: int) -> list[int]:
        return self._values(STAGES, divisors(self.world // tp), self.job.parallel.pipeline.stages)

    def micros(self, stages: int, local: int, out: Counter[str]) -> Iterator[int]:
        requested = self.job.parallel.pipeline.micro_batch_num or stages
        for n in self._values(MICROS, divisors(local), requested):
            if local % n:
                out[f"{local} samples of a rank cannot be divided evenly into {n} micro batches"] += 1
            elif n < stages:
                out["fewer micro batches than stages"] += 1
            else:
                yield n

    def schedules(self, stages: int) -> Iterator[tuple[str, int]]:
        """Yields each scheduler with its number of virtual stages per rank.

        The number is 1 if the scheduler sets its own.
        """
        pipe = self.job.parallel.pipeline
        if stages == 1:
            yield "1f1b", 1
            return
        both = self._values(INTERLEAVE, (False, True), pipe.interleave)
        for scheduler in self._values(SCHEDULER, SCHEDULERS, pipe.scheduler):
            for interleave in both:
                if not interleave:
                    yield scheduler, 1
                elif not (RULES[scheduler].single or RULES[scheduler].v):
                    for chunks in self._values(CHUNKS, range(2, MOST_CHUNKS + 1), pipe.chunks):
                        yield scheduler, chunks

    def sharing(self, replicas: int) -> Iterator[Hsdp | None]:
        """Yields ways to shard weights; ``None``: every rank has all weights of its stage."""
        left_open = self.over.get(HSDP) == AUTO
        if left_open and replicas == 1:
            yield None
            return
        options = self._values(HSDP, (None, Hsdp()), self.job.parallel.hsdp)
        if not left_open and {SHARD, LEVEL} & self.over.keys():
            options = [one or Hsdp() for one in options]
        for one in options:
            if one is None:
                yield None
                continue
            base = one if isinstance(one, Hsdp) else Hsdp.model_validate(one)
            every = dict.fromkeys((SHARD, LEVEL), AUTO) if left_open else {}
            over = {**every, **self.over}
            for shard in _values(over, SHARD, divisors(replicas)[1:] or [1], base.shard_size):
                for level in _values(over, LEVEL, LEVELS, base.optimizer_level):
                    size = replicas if shard == -1 else shard
                    yield base.model_copy(update={"shard_size": size, "optimizer_level": level})

    def recompute(self) -> Mapping[str, Recompute | None]:
        choices = self.over.get(RECOMPUTE)
        if choices is None:
            return {AS_REQUESTED: self.job.parallel.recompute}
        return dict(
            self._recompute(one, n) for n, one in enumerate([AUTO] if choices == AUTO else choices, 1)
        )

    def _recompute(self, value: Any, n: int) -> tuple[str, Recompute | None]:
        """Returns the name and the value of the ``n``-th candidate; without a memory limit, auto is none."""
        settings = {"modules": AUTO} if value == AUTO else value
        recompute = None if settings is None else Recompute.model_validate(settings)
        if recompute is None or recompute.modules != AUTO:
            return str(n), recompute
        return (
            AUTO if value == AUTO else f"{AUTO} {n}",
            None if self.job.cluster.memory_gb is None else recompute,
        )


def _values(over: Mapping[str, Any], key: str, auto: Sequence[Any], requested: Any) -> list[Any]:
    """Returns candidates for a key: the values of auto, the listed ones, or the one in the request."""
    choices = over.get(key)
    if choices is None:
        return [requested]
    return list(auto) if choices == AUTO else _once(choices)


def _once(values: Sequence[Any]) -> list[Any]:
    """Returns ``values`` without repetitions; dicts among them are not hashable."""
    return [v for n, v in enumerate(values) if v not in values[:n]]
