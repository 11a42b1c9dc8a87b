from __future__ import annotations

import pytest

from launcher.plan.plan import ask
from launcher.plan.resolve.grid import sizes
from tests.plan.made import job, refusal, words

STAGES = "parallel.pipeline.stages"
HSDP = "parallel.hsdp"

REFUSED = {
    "world": (
        ["launch.nproc=3", f"{STAGES}=2"],
        "launch.nproc: 3: cannot be divided evenly into 2 pipeline stages (try: launch.nproc=4)",
    ),
    "world over nodes": (
        ["launch.nproc=1", "launch.nnodes=3", f"{STAGES}=2", "train.batch_size=36"],
        "launch.nproc: 1: 3 ranks on 3 nodes cannot be divided evenly into 2 pipeline stages (try: launch.nproc=2)",
    ),
    "world, and the cure suits the shards": (
        ["launch.nproc=3", f"{STAGES}=2", f"{HSDP}.shard_size=4"],
        "launch.nproc: 3: cannot be divided evenly into 2 pipeline stages (try: launch.nproc=8)",
    ),
    "batch": (
        ["launch.nproc=4", f"{STAGES}=2", "train.batch_size=30"],
        "train.batch_size: 30: these samples cannot be divided evenly into 2 data-parallel ranks x 2 micro batches "
        "(try: train.batch_size=32)",
    ),
    "batch smaller than its pieces": (
        ["launch.nproc=1", "parallel.pipeline.micro_batch_num=7", "train.batch_size=1"],
        "train.batch_size: 1: these samples cannot be divided evenly into 1 data-parallel rank x 7 micro batches "
        "(try: train.batch_size=7)",
    ),
    "micro batches": (
        ["launch.nproc=4", f"{STAGES}=4", "parallel.pipeline.micro_batch_num=2"],
        "parallel.pipeline.micro_batch_num: 2: too few to fill 4 stages; at least as many are needed "
        "(try: parallel.pipeline.micro_batch_num=4)",
    ),
    "micro batches, and the batch that the cure needs": (
        ["launch.nproc=4", f"{STAGES}=4", "parallel.pipeline.micro_batch_num=2", "train.batch_size=6"],
        "parallel.pipeline.micro_batch_num: 2: too few to fill 4 stages; at least as many are needed "
        "(try: parallel.pipeline.micro_batch_num=4)\n"
        "train.batch_size: 6: these samples cannot be divided evenly into 1 data-parallel rank x 4 micro batches "
        "(try: train.batch_size=8)",
    ),
    "shard size": (
        ["launch.nproc=12", f"{STAGES}=2", f"{HSDP}.shard_size=4", "train.batch_size=24"],
        "parallel.hsdp.shard_size: 4: does not divide the 6 data-parallel ranks (12 ranks / 2); use one of 1, 2, 3, 6 "
        "(try: parallel.hsdp.shard_size=3)",
    ),
    "shard size of one rank": (
        ["launch.nproc=2", f"{STAGES}=2", f"{HSDP}.shard_size=2"],
        "parallel.hsdp.shard_size: 2: there is only 1 data-parallel rank (2 ranks / 2); use 1 "
        "(try: parallel.hsdp.shard_size=1)",
    ),
    "shard axis": (
        ["launch.nproc=4", f"{HSDP}={{}}", "parallel.grid.dp_shard=3"],
        "parallel.grid.dp_shard: 3: does not divide the 4 data-parallel ranks (4 ranks / 1); use one of 1, 2, 4 "
        "(try: parallel.grid.dp_shard=2)",
    ),
    "shard axis against shard size": (
        ["launch.nproc=4", f"{HSDP}.shard_size=2", "parallel.grid.dp_shard=4"],
        "parallel.grid.dp_shard: 4: contradicts parallel.hsdp.shard_size=2 (try: parallel.grid.dp_shard=2)",
    ),
    "shard axis without sharding": (
        ["launch.nproc=4", "parallel.grid.dp_shard=4"],
        "parallel.grid.dp_shard: 4: sharding needs parallel.hsdp (try: 'parallel.hsdp={}')",
    ),
    "replicas": (
        ["launch.nproc=8", f"{HSDP}.shard_size=2", "parallel.grid.dp_replicate=2"],
        "parallel.grid.dp_replicate: 2: 2 replicas x 2 shards are not 8 data-parallel ranks (try: "
        "parallel.grid.dp_replicate=4)",
    ),
    "pipeline axis": (
        ["launch.nproc=4", f"{STAGES}=2", "parallel.grid.pp=4"],
        "parallel.grid.pp: 4: contradicts parallel.pipeline.stages=2 (try: parallel.pipeline.stages=4)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_refused_with_numbers_that_do(case: str) -> None:
    overrides, text = REFUSED[case]
    error = refusal(*overrides)
    assert str(error) == text
    ask(job(*overrides, *words(error)))


WORKED_OUT = {
    "one rank": (["launch.nproc=null"], (1, 1, 1, 1), [
        "launch.nproc null -> 1: as many ranks as the layout needs",
        "parallel.pipeline.micro_batch_num null -> 1: as many as stages",
    ]),
    "ranks for the layout": (
        ["launch.nproc=null", f"{STAGES}=2", f"{HSDP}.shard_size=4", "parallel.pipeline.micro_batch_num=4"],
        (2, 1, 4, 1), ["launch.nproc null -> 8: as many ranks as the layout needs"],
    ),
    "ranks for the grid": (
        ["launch.nproc=null", f"{HSDP}={{}}", "parallel.grid={dp_replicate: 2, dp_shard: 4}"], (1, 2, 4, 1), [
            "launch.nproc null -> 8: as many ranks as the layout needs",
            "parallel.hsdp.shard_size -1 -> 4: parallel.grid.dp_shard",
            "parallel.pipeline.micro_batch_num null -> 1: as many as stages",
        ],
    ),
    "ranks that fill the nodes": (
        ["launch.nproc=null", "launch.nnodes=3", f"{STAGES}=2", "train.batch_size=36"], (2, 3, 1, 1), [
            "launch.nproc null -> 2: as many ranks as the layout needs",
            "parallel.pipeline.micro_batch_num null -> 2: as many as stages",
        ],
    ),
    "everything is a shard": (
        ["launch.nproc=8", f"{STAGES}=2", f"{HSDP}={{}}"], (2, 1, 4, 1), [
            "parallel.hsdp.shard_size -1 -> 4: the data-parallel group",
            "parallel.pipeline.micro_batch_num null -> 2: as many as stages",
        ],
    ),
    "replicas of shards": (
        ["launch.nproc=8", f"{HSDP}.shard_size=2", "parallel.pipeline.micro_batch_num=2"], (1, 4, 2, 1), [],
    ),
    "fewer steps": (
        ["debug=limit", "debug.limit=3", "parallel.pipeline.micro_batch_num=1"], (1, 1, 1, 1),
        ["train.steps 200 -> 3: debug.limit"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORKED_OUT)
def test_sizes_that_are_not_set_are_computed_and_noted(case: str) -> None:
    overrides, grid, notes = WORKED_OUT[case]
    got, problems = sizes(job(*overrides))
    assert problems == []
    assert got is not None
    assert got.grid.axes == tuple(zip(("pp", "dp_replicate", "dp_shard", "tp"), grid, strict=True))
    assert [str(n) for n in got.notes] == notes


def test_a_batch_is_cut_into_ranks_and_micro_batches() -> None:
    got, _ = sizes(job("launch.nproc=8", f"{STAGES}=2", "parallel.pipeline.micro_batch_num=4", "train.batch_size=64"))
    assert got is not None
    assert (got.replicas, got.micros, got.global_batch, got.local_batch, got.micro_batch) == (4, 4, 64, 16, 4)


def test_chunks_are_virtual_stages_of_every_rank() -> None:
    got, _ = sizes(
        job("launch.nproc=2", f"{STAGES}=2", "parallel.pipeline.interleave=true", "parallel.pipeline.chunks=3")
    )
    assert got is not None
    assert (got.chunks, got.virtual) == (3, 6)


def test_one_stage_is_never_cut_into_chunks() -> None:
    got, _ = sizes(job("parallel.pipeline.interleave=true"))
    assert got is not None
    assert (got.chunks, got.virtual) == (1, 1)
