"""Which samples each rank reads, counted on real ranks by a reader that records every sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training.batches import Feed, Indices
from tests.parity import job
from tests.ranks import on_ranks

BATCH, HELD_OUT = 8, 11


class Counting:
    """Sample ``i`` consists of the number ``i``; ``read`` records each read, with the kind of what was read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return self.samples

    def inputs(self, indices: Indices) -> tuple[torch.Tensor, ...]:
        self.read += [("inputs", int(i)) for i in indices]
        return torch.from_numpy(np.repeat(indices[:, None], 3, axis=1)).double(), torch.from_numpy(indices)

    def targets(self, indices: Indices) -> torch.Tensor:
        self.read += [("targets", int(i)) for i in indices]
        return torch.from_numpy(indices)


@dataclass(frozen=True)
class Seen:
    """What one rank read for a training step, the samples that it then had, and its held-out samples."""

    read: list[tuple[str, int]]
    inputs: list[int]
    targets: list[int]
    held_out: list[int]


def rank_reads(world: World, plan: Plan) -> Seen:
    train, val = Counting(32), Counting(HELD_OUT)
    order, cpu = lambda step, size, n: np.arange(size), torch.device("cpu")
    feed = Feed(train, val, order, plan, world.rank, cpu, torch.float32, torch.float32)
    b = feed.batch(0)
    for floats, _ in [b.inputs] if b.inputs else []:
        assert floats.dtype == torch.float32
    held = [t for h in feed.held_out(None) if h.targets is not None for t in h.targets[: h.valid].tolist()]
    inputs = b.inputs[1].tolist() if b.inputs else []
    return Seen(train.read, inputs, [] if b.targets is None else b.targets.tolist(), held)


def seen(pp: int, replicas: int, **parallel: Any) -> list[Seen]:
    j = job(parallel={"pipeline": {"stages": pp}, **parallel}, launch__nproc=pp * replicas)
    return on_ranks(pp * replicas, rank_reads, plan_job(j))


def level(n: int) -> dict[str, Any]:
    return {"transformer_opt": {"dataset_broadcast_opt_level": n}}


HALVES = [list(range(4)), list(range(4, 8))]
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {}, "level 0": level(0), "level 1": level(1), "level 2": level(2), "level 3": level(3),
    "full batch": {"dataset_strategy": "full_batch"}, "by slices": {"dataset_strategy": [[2, 1], [2, 1]]},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_has_its_samples_however_they_are_read(way: str) -> None:
    ranks = seen(2, 2, **WAYS[way])  # rank = 2 pp + dp
    assert [r.inputs for r in ranks] == [*HALVES, [], []]
    assert [r.targets for r in ranks] == [[], [], *HALVES]
    assert sorted(i for r in ranks for i in r.held_out) == list(range(HELD_OUT))


@pytest.mark.parametrize("way", ["as it is", "level 1", "level 3", "by slices"])
def test_one_rank_of_a_pipeline_reads_and_no_sample_twice(way: str) -> None:
    ranks = seen(2, 2, **WAYS[way])
    assert Counter(r for s in ranks for r in s.read) == {
        (what, i): 1 for what in ("inputs", "targets") for i in range(8)
    }
    assert [bool(s.read) for s in ranks] == [True, True, False, False]


@pytest.mark.parametrize("way", ["level 0", "level 2"])
def test_asked_to_the_last_stage_reads_its_targets_itself(way: str) -> None:
    ranks = seen(2, 2, **WAYS[way])
    assert [{what for what, _ in s.read} for s in ranks] == [{"inputs"}, {"inputs"}, {"targets"}, {"targets"}]


def test_full_batch_reads_everything_on_every_data_parallel_rank() -> None:
    ranks = seen(1, 2, dataset_strategy="full_batch")
    everything = {(what, i): 1 for what in ("inputs", "targets") for i in range(8)}
    assert [Counter(s.read) for s in ranks] == [everything, everything]
    assert [s.inputs for s in ranks] == HALVES


def test_ranks_that_share_a_part_keep_their_own_slice_of_it() -> None:
    ranks = seen(1, 4, dataset_strategy=[[2, 1], [2, 1]])
    assert [[i for what, i in s.read if what == "inputs"] for s in ranks] == [
        HALVES[0],
        HALVES[0],
        HALVES[1],
        HALVES[1],
    ]
    assert [s.inputs for s in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


TP: dict[str, Any] = {"operators": {"layers.*.mlp.up": {"weight": ["tp", None], "output": [None, None, None]}}}


@pytest.mark.parametrize(("n", "readers"), [(0, [0, 1, 2, 3]), (1, [0, 1]), (2, [0, 2]), (3, [0])])
def test_a_tensor_parallel_group_has_one_reader_or_as_many_as_asked(n: int, readers: list[int]) -> None:
    j = job(parallel={"pipeline": {"stages": 2}, "grid": {"tp": 2}, **TP, **level(n)})
    ranks = on_ranks(4, rank_reads, plan_job(j))  # rank = 2 pp + tp
    everything = list(range(8))
    assert [r.inputs for r in ranks] == [everything, everything, [], []]
    assert [r.targets for r in ranks] == [[], [], everything, everything]
    assert [rank for rank, s in enumerate(ranks) if s.read] == readers
    most = Counter(r for s in ranks for r in s.read)
    assert set(most.values()) == {2 if n in (0, 1) else 1}
