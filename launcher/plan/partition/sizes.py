"""Every number that needs no model, worked out: grid, micro batches, samples a rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.components import LanguageModel
from launcher.job.schema.job import Job
from launcher.plan.operators.strategy import degree
from launcher.plan.schedule.schedules import RULES, placement
from launcher.plan.values.grid import Grid
from launcher.plan.values.text import many

MICROS = "parallel.pipeline.micro_batch_num"


@dataclass(frozen=True)
class Note:
    """A default that was worked out, or anything else the reader of a plan should know."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} {self.text}"


@dataclass(frozen=True)
class Sizes:
    """``virtual`` stages lie ``chunks`` to a rank, round after round or (``v``) there and back.

    Batches are samples; ``local_batch`` is a data-parallel rank's. In training, the sequences of a micro batch pass in
    so many ``pieces``.
    """

    grid: Grid
    chunks: int
    micros: int
    global_batch: int
    local_batch: int
    micro_batch: int
    steps: int
    notes: tuple[Note, ...]
    v: bool = False
    pieces: int = 1

    @property
    def places(self) -> tuple[int, ...]:
        """The pipeline rank of each virtual stage."""
        return placement(self.grid["pp"], self.chunks, self.v)

    def held(self, pp: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank, in order."""
        return tuple(s for s, rank in enumerate(self.places) if rank == pp)

    @property
    def virtual(self) -> int:
        return self.grid["pp"] * self.chunks

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: each reads its own samples."""
        return self.grid["dp_replicate"] * self.grid["dp_shard"]


def sizes(job: Job) -> tuple[Sizes | None, list[Problem]]:
    """Work out the sizes of ``job``, or say why they do not fit. ``None`` when there is no grid to speak of."""
    notes: list[Note] = []
    found: list[Problem] = []
    grid = _grid(job, notes, found)
    pipe = job.parallel.pipeline
    micros = _micros(job, notes, found)
    steps = job.train.steps
    if job.debug.limit is not None and job.debug.limit < steps:
        steps = job.debug.limit
        notes.append(Note("train.steps", f"{job.train.steps} -> {steps}: debug.limit"))
    if grid is None:
        return None, found
    pieces, batch = grid["dp_replicate"] * grid["dp_shard"] * micros, job.train.batch_size
    if batch % pieces:
        parts = f"{many(pieces // micros, 'data-parallel rank')} x {many(micros, 'micro batch')}"
        text = f"{batch}: these samples cannot be cut evenly into {parts}"
        found.append(Problem("train.batch_size", text, f"train.batch_size={-(-batch // pieces) * pieces}"))
    rule = RULES.get(pipe.scheduler)
    v = rule is not None and rule.v and pipe.stages > 1
    chunks = 1 if pipe.stages == 1 else 2 if v else pipe.chunks if pipe.interleave else 1
    local, micro = batch * micros // pieces, batch // pieces
    return Sizes(grid, chunks, micros, batch, local, micro, steps, tuple(notes), v, pipe.seq_chunks), found


def _micros(job: Job, notes: list[Note], found: list[Problem]) -> int:
    """As many as are asked for, but enough to go on with when they are too few."""
    asked, stages = job.parallel.pipeline.micro_batch_num, job.parallel.pipeline.stages
    least, why = stages, "as many as stages"
    rule = RULES.get(job.parallel.pipeline.scheduler)
    if rule is not None and rule.v and stages > 1 and rule.full:
        least, why = 2 * stages, f"as many as virtual stages, which {job.parallel.pipeline.scheduler} needs"
    if asked is None:
        notes.append(Note(MICROS, f"null -> {least}: {why}"))
    elif asked < stages:
        text = f"{asked}: too few to fill {stages} stages; at least as many are needed"
        found.append(Problem(MICROS, text, f"{MICROS}={least}"))
    elif asked < least:
        text = f"{asked}: too few; {job.parallel.pipeline.scheduler} needs as many as virtual stages, {least}"
        found.append(Problem(MICROS, text, f"{MICROS}={least}"))
    return max(asked or 0, least)


def _grid(job: Job, notes: list[Note], found: list[Problem]) -> Grid | None:
    par = job.parallel
    pp, tp = par.pipeline.stages, _tp(job, notes, found)
    if par.grid.pp not in (None, pp):
        text = f"{par.grid.pp}: contradicts parallel.pipeline.stages={pp}"
        found.append(Problem("parallel.grid.pp", text, f"parallel.grid.pp={pp}"))
    shard = _shard(job, found)
    need = lcm(pp * tp * (shard or 1) * (par.grid.dp_replicate or 1), job.launch.nnodes)
    if job.launch.nproc is None:
        notes.append(Note("launch.nproc", f"null -> {need // job.launch.nnodes}: as many ranks as the layout needs"))
    world = need if job.launch.nproc is None else job.launch.nproc * job.launch.nnodes
    if world % (pp * tp):
        found.append(_indivisible(job, world, tp, pp * tp * (shard or 1)))
        return None
    dp = world // (pp * tp)
    shard = shard or dp
    if par.hsdp is not None and par.hsdp.shard_size == -1:
        why = "parallel.grid.dp_shard" if par.grid.dp_shard else "the data-parallel group"
        notes.append(Note("parallel.hsdp.shard_size", f"-1 -> {shard}: {why}"))
    if dp % shard:
        found.append(_indivisible_shard(job, world, dp, shard))
        shard = gcd(dp, shard)  # what else is wrong does not hang on it
    if par.grid.dp_replicate not in (None, dp // shard):
        key, asked = "parallel.grid.dp_replicate", par.grid.dp_replicate
        text = f"{asked}: {asked} x {shard} sharded is not the {many(dp, 'data-parallel rank')} there are"
        found.append(Problem(key, text, f"{key}={dp // shard}"))
    return Grid.of(pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp)


def _shard(job: Job, found: list[Problem]) -> int | None:
    """Ranks that share one copy of the weights; ``None`` for all data-parallel ranks, however many there are."""
    hsdp, asked = job.parallel.hsdp, job.parallel.grid.dp_shard
    key = "parallel.grid.dp_shard"
    if hsdp is None:
        if asked not in (None, 1):
            found.append(Problem(key, f"{asked}: sharding needs parallel.hsdp", quote("parallel.hsdp={}")))
        return 1
    if hsdp.shard_size > 0 and asked not in (None, hsdp.shard_size):
        text = f"{asked}: contradicts parallel.hsdp.shard_size={hsdp.shard_size}"
        found.append(Problem(key, text, f"{key}={hsdp.shard_size}"))
    return hsdp.shard_size if hsdp.shard_size > 0 else asked


def _tp(job: Job, notes: list[Note], found: list[Problem]) -> int:
    """Ranks that share one operator: as asked, or as the slices of the operators say."""
    key, asked, operators = "parallel.grid.tp", job.parallel.grid.tp, job.parallel.operators
    said, clash = degree(operators)
    if clash:
        found.append(Problem("parallel.operators", f"cuts over tp into different numbers of slices: {clash}"))
    elif operators and asked is None and said is None:
        text = "null: parallel.operators names the axis tp, and nothing says how many ranks it has"
        found.append(Problem(key, text, f"{key}=2"))
    elif asked is not None and said not in (None, asked):
        found.append(Problem(key, f"{asked}: parallel.operators cuts into {said} slices", f"{key}={said}"))
    elif asked is None and said is not None:
        notes.append(Note(key, f"null -> {said}: the slices of parallel.operators"))
    elif asked == 1 and operators:
        notes.append(Note("parallel.operators", "has no effect: tp has one rank"))
    elif (asked or 1) > 1 and not operators:
        cure = "operators=megatron" if isinstance(job.model, LanguageModel) else f"{key}=1"
        found.append(Problem(key, f"{asked}: parallel.operators cuts nothing over tp", cure))
    return asked or said or 1


def _indivisible(job: Job, world: int, tp: int, unit: int) -> Problem:
    """The cure is the next larger number of ranks a node that makes whole pipelines, and whole groups of shards."""
    pp, nodes = job.parallel.pipeline.stages, job.launch.nnodes
    step = unit // gcd(unit, nodes)
    what = many(pp, "pipeline stage") + (f" x {tp}-way tensor parallelism" if tp > 1 else "")
    ranks = "" if nodes == 1 else f"{many(world, 'rank')} on {nodes} nodes "
    cure = f"launch.nproc={-(-(job.launch.nproc or 1) // step) * step}"
    return Problem("launch.nproc", f"{job.launch.nproc}: {ranks}cannot be cut evenly into {what}", cure)


def _indivisible_shard(job: Job, world: int, dp: int, shard: int) -> Problem:
    hsdp = job.parallel.hsdp
    key = "parallel.hsdp.shard_size" if hsdp and hsdp.shard_size > 0 else "parallel.grid.dp_shard"
    fits = [n for n in range(1, dp + 1) if dp % n == 0]
    text = f"{shard}: does not divide the {many(dp, 'data-parallel rank')} ({world} ranks / {world // dp})"
    text += f"; what does: {', '.join(map(str, fits))}"
    return Problem(key, text, f"{key}={max(n for n in fits if n <= shard)}")
