"""The degree of every axis, requested or derived."""

from __future__ import annotations

from math import gcd, lcm

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel
from launcher.job.schema.parallel import Pipeline
from launcher.job.schema.steps import Load, Train
from launcher.plan.resolve import device_matrix, hsdp, pipeline
from launcher.plan.resolve.device_matrix import choose_engine
from launcher.plan.schedule.schedules import RULES
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel import strategy_reader
from launcher.plan.values.grid import Grid
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import EngineChoice
from launcher.plan.values.text import many

OPERATORS = "parallel.operators"
TP = "parallel.grid.tp"
SEARCHED = "parallel.mode=recursive_programming"


def tp_degree(job: Job, notes: list[Note], problems: list[Problem]) -> int:
    """Returns the size of tp: as requested, or as the slices of the operators imply; 1 if neither does."""
    requested, operators = job.parallel.grid.tp, job.parallel.operators
    implied, clash = strategy_reader.degree(operators)

    # contradictions among the operators, a missing size of tp, and a contradiction between both
    if clash:
        problems.append(Problem(OPERATORS, f"cuts over tp into different numbers of slices: {clash}"))
    elif operators and requested is None and implied is None:
        text = f"null: {OPERATORS} names the axis tp, but no setting says how many ranks it has"
        problems.append(Problem(TP, text, f"{TP}=2"))
    elif requested is not None and implied not in (None, requested):
        problems.append(
            Problem(TP, f"{requested}: {OPERATORS} cuts into {implied} slices", f"{TP}={implied}")
        )

    # one follows from the other, or has no effect
    elif requested is None and implied is not None:
        notes.append(Note(TP, f"null -> {implied}: the slices of {OPERATORS}"))
    elif requested == 1 and operators:
        notes.append(Note(OPERATORS, "has no effect: tp has one rank"))
    elif (requested or 1) > 1 and not operators and job.parallel.param_strategy.load is None:
        text = f"{requested}: {OPERATORS} cuts nothing over tp"
        if isinstance(job.model, LanguageModel):
            cure = "operators=megatron"
        else:
            cure = SEARCHED
            text += f"; set there how each operator is cut, or let {SEARCHED} choose, for any model"
        problems.append(Problem(TP, text, cure))
    return requested or implied or 1


KEY = "parallel.grid"


def sizes(job: Job, engine: EngineChoice | None = None) -> tuple[Sizes | None, list[Problem]]:
    """Returns the sizes of ``job`` and their problems; the sizes are ``None`` if no grid can be made.

    ``engine``: how operators are cut, if files or the model decided it.
    """
    engine = engine or choose_engine(job)
    notes: list[Note] = []
    problems: list[Problem] = []
    grid = _grid(job, engine, notes, problems)
    micros = pipeline.micros(job, notes, problems)
    steps, epochs = _length(job, notes)
    if grid is None:
        return None, problems

    # each data-parallel rank has the same number of micro batches, all of the same size
    replicas = grid["dp_replicate"] * grid["dp_shard"]
    slots = replicas * micros
    batch = job.train.batch_size
    if batch % slots:
        parts = f"{many(replicas, 'data-parallel rank')} x {many(micros, 'micro batch')}"
        text = f"{batch}: these samples cannot be divided evenly into {parts}"
        problems.append(Problem("train.batch_size", text, f"train.batch_size={-(-batch // slots) * slots}"))

    pipe = job.parallel.pipeline
    v = pipe.scheduler in RULES and RULES[pipe.scheduler].v and pipe.stages > 1
    got = Sizes(
        grid=grid,
        chunks=_chunks(pipe, v),
        micros=micros,
        global_batch=batch,
        local_batch=batch * micros // slots,
        micro_batch=batch // slots,
        steps=steps,
        notes=tuple(notes),
        v=v,
        pieces=pipe.seq_chunks,
        epochs=epochs,
        engine=engine,
    )
    return got, problems


def _chunks(pipe: Pipeline, v: bool) -> int:
    """Returns the number of virtual stages per rank; a V-shaped schedule (``v``) has two."""
    if pipe.stages == 1:
        return 1
    if v:
        return 2
    return pipe.chunks if pipe.interleave else 1


def _length(job: Job, notes: list[Note]) -> tuple[int, int | None]:
    """Returns the optimizer steps of all ``train`` steps together, and their epochs if these were requested.

    ``debug.limit`` may reduce the steps of each; then there are no epochs.
    """
    steps, limit, epochs = job.train.steps, job.debug.limit, job.train.epochs
    assert steps is not None, "the planner computes train.steps from train.epochs"
    if limit is not None and limit < steps:
        notes.append(Note("train.steps", f"{steps} -> {limit}: debug.limit"))
        steps, epochs = limit, None

    times = sum(isinstance(step, Train) for step in job.steps.values())
    if times > 1:
        why = f"train runs {times} times, {_ends(job, steps, times)}"
        notes.append(Note("train.steps", f"{steps} -> {steps * times}: {why}"))
        steps, epochs = steps * times, None if epochs is None else epochs * times
    return steps, epochs


def _ends(job: Job, steps: int, times: int) -> str:
    """Returns when each of several ``train`` steps ends.

    They end at fixed numbers of optimizer steps. A ``load`` between them may change that number.
    """
    trains = [k for k, step in enumerate(job.steps.values()) if isinstance(step, Train)]
    between = [*job.steps.items()][trains[0] : trains[-1]]
    loads = [name for name, step in between if isinstance(step, Load)]
    if not loads:
        return f"{steps} steps each"
    *first, last = (steps * k for k in range(1, times + 1))
    listed = f"{', '.join(map(str, first))} and {last}"
    return f"until step {listed}; {', '.join(loads)} continues at the step of its checkpoint"


def _grid(job: Job, engine: EngineChoice, notes: list[Note], problems: list[Problem]) -> Grid | None:
    """Returns the grid; ``None``, with a problem in ``problems``, if the ranks do not make full pipelines."""
    if engine.over_matrices:
        return _one_set(job, engine, notes, problems)
    requested = job.parallel.grid
    pp = job.parallel.pipeline.stages
    tp = tp_degree(job, notes, problems)
    if requested.pp not in (None, pp):
        problems.append(_other_stages(requested.pp, pp))
    shard = hsdp.shards(job, problems)

    # the number of ranks: as requested, or as few as the layout needs
    need = lcm(pp * tp * (shard or 1) * (requested.dp_replicate or 1), job.launch.nnodes)
    if job.launch.nproc is None:
        a_node = need // job.launch.nnodes
        notes.append(Note("launch.nproc", f"null -> {a_node}: as many ranks as the layout needs"))
    world = need if job.launch.nproc is None else job.launch.nproc * job.launch.nnodes
    if world % (pp * tp):
        problems.append(_indivisible(job, world, tp, pp * tp * (shard or 1)))
        return None

    # the other ranks are data-parallel: copies of the model, each sharded
    dp = world // (pp * tp)
    shard = shard or dp
    notes += hsdp.shard_size_notes(job, shard)
    if dp % shard:
        problems.append(hsdp.indivisible(job, world, dp, shard))
        shard = gcd(dp, shard)  # continue, so that independent problems are reported too
    if requested.dp_replicate not in (None, dp // shard):
        key, n = f"{KEY}.dp_replicate", requested.dp_replicate
        text = f"{n}: {many(n, 'replica')} x {many(shard, 'shard')} are not {many(dp, 'data-parallel rank')}"
        problems.append(Problem(key, text, f"{key}={dp // shard}"))
    return Grid.of(pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp)


def _other_stages(requested: int | None, stages: int) -> Problem:
    """Returns the problem of a grid with another number of stages than the pipeline."""
    key = "parallel.pipeline.stages"
    return Problem(f"{KEY}.pp", f"{requested}: contradicts {key}={stages}", f"{key}={requested}")


def _one_set(job: Job, engine: EngineChoice, notes: list[Note], problems: list[Problem]) -> Grid | None:
    """Returns a grid with all ranks of a stage on one axis, because each operator arranges them itself."""
    pp, requested = job.parallel.pipeline.stages, job.parallel.grid.pp
    if requested not in (None, pp):
        problems.append(_other_stages(requested, pp))
    ranks = device_matrix.ranks(job, engine, problems)
    problems += device_matrix.problems(job, ranks)
    if ranks is None:
        return None
    if job.launch.nproc is None:
        a_node = pp * ranks // job.launch.nnodes
        notes.append(Note("launch.nproc", f"null -> {a_node}: as many ranks as the strategies need"))
    return Grid.of(pp=pp, dp_replicate=1, dp_shard=1, tp=ranks)


def _indivisible(job: Job, world: int, tp: int, unit: int) -> Problem:
    """Returns the problem of ``world`` ranks that do not make full pipelines.

    The cure is the next larger number of ranks per node that makes full pipelines and full groups of shards.
    """
    pp, nodes = job.parallel.pipeline.stages, job.launch.nnodes
    step = unit // gcd(unit, nodes)
    factors = many(pp, "pipeline stage") + (f" x {tp}-way tensor parallelism" if tp > 1 else "")
    ranks = "" if nodes == 1 else f"{many(world, 'rank')} on {nodes} nodes "
    cure = f"launch.nproc={-(-(job.launch.nproc or 1) // step) * step}"
    return Problem(
        "launch.nproc", f"{job.launch.nproc}: {ranks}cannot be divided evenly into {factors}", cure
    )
