"""torch's own schedules compared with ours, on a fake process group: one process stands for one rank of many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    _Action,
    _simulate_comms_compute,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Action, Row, Schedule
from launcher.plan.schedule.simulate import Cost, Timeline, simulate
from launcher.runtime.torch_private import pipelining

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SHAPES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (3, 4), (4, 4), (4, 9)]
"""(ranks, micros)"""


@contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


class Noted(PipelineStage):
    """A stage that records the order in which torch runs its actions."""

    def __init__(self, index: int, stages: int, group: dist.ProcessGroup) -> None:
        takes, gives = torch.zeros(1, 1, requires_grad=index > 0), torch.zeros(1, 1, requires_grad=True)
        super().__init__(nn.Linear(1, 1), index, stages, torch.device("cpu"), (takes,), (gives,), group=group)
        self.row: list[Action] = []

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # a fake group cannot exchange the votes for static shapes
        return torch.ones(1, dtype=torch.int32)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.row.append(Action(self.stage_index, "F", fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.row.append(Action(self.stage_index, "B", bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def as_run(scheduler: str, ranks: int, rank: int, micros: int) -> Row:
    """Return the actions of ``rank`` in the order in which torch runs its schedule."""
    with one_of(ranks, rank) as group:
        stage = Noted(rank, ranks, group)
        run = SINGLE[scheduler](stage, micros, loss_fn=nn.functional.mse_loss)
        batch = torch.zeros(micros, 1)
        run.step(*([batch] if rank == 0 else []), target=batch if rank == ranks - 1 else None)
    return tuple(stage.row)


def stages(places: tuple[int, ...], group: dist.ProcessGroup) -> list[Noted]:
    return [Noted(s, len(places), group) for s, rank in enumerate(places) if rank == 0]


def of_torch(kind: type, ranks: int, chunks: int, micros: int, v: bool = False) -> Schedule:
    """Return every rank's order as torch computes it, without waits; overlapped actions are in sequence."""
    with one_of(ranks) as group:
        parts = stages(schedules.placement(ranks, chunks, v), group)
        order = kind(parts, micros, loss_fn=nn.functional.mse_loss).pipeline_order
    return tuple(
        tuple(
            Action(a.stage_index, a.computation_type.value, a.microbatch_index)
            for whole in order[r] if whole is not None for a in whole.sub_actions or (whole,)
        )
        for r in range(ranks)
    )  # fmt: skip


def simulated(schedule: Schedule, ranks: int, chunks: int, v: bool = False) -> Timeline:
    n = ranks * chunks
    return simulate(schedule, schedules.placement(ranks, chunks, v), Cost((1,) * n, (2,) * n, (1,) * n))


@pytest.mark.parametrize(("ranks", "micros"), SHAPES)
@pytest.mark.parametrize("scheduler", SINGLE)
def test_gpipe_and_1f1b_are_torchs_action_for_action(scheduler: str, ranks: int, micros: int) -> None:
    ran = tuple(as_run(scheduler, ranks, rank, micros) for rank in range(ranks))
    assert schedules.build(scheduler, ranks, 1, micros) == ran


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (2, 6), (3, 5), (3, 9), (4, 4), (4, 6), (4, 16)])
def test_interleaved_1f1b_is_torchs_where_torch_has_it_so(ranks: int, chunks: int, micros: int) -> None:
    ours, theirs = (
        schedules.build("1f1b", ranks, chunks, micros),
        of_torch(ScheduleInterleaved1F1B, ranks, chunks, micros),
    )
    assert ours == theirs
    assert simulated(ours, ranks, chunks) == simulated(theirs, ranks, chunks)


@pytest.mark.parametrize(("ranks", "micros"), [(3, 8), (4, 10), (6, 14)])
def test_another_remainder_rule_than_torchs_costs_no_time(ranks: int, micros: int) -> None:
    ours, theirs = schedules.build("1f1b", ranks, 2, micros), of_torch(ScheduleInterleaved1F1B, ranks, 2, micros)
    assert ours != theirs
    assert simulated(ours, ranks, 2).makespan == simulated(theirs, ranks, 2).makespan


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (2, 5), (3, 4), (4, 8)])
def test_looped_bfs_takes_the_time_and_memory_of_torchs(ranks: int, chunks: int, micros: int) -> None:
    ours, theirs = schedules.build("gpipe", ranks, chunks, micros), of_torch(ScheduleLoopedBFS, ranks, chunks, micros)
    a, b = simulated(ours, ranks, chunks), simulated(theirs, ranks, chunks)
    assert (a.makespan, a.peak, a.busy, a.messages) == (b.makespan, b.peak, b.busy, b.messages)


SPLIT = {
    "zero_bubble_h1": (ScheduleInterleavedZeroBubble, 1, False, [(2, 2), (2, 4), (3, 3), (4, 4), (4, 12)]),
    "zero_bubble_v": (
        ScheduleZBVZeroBubble,
        2,
        True,
        [(2, 1), (2, 7), (3, 3), (3, 5), (4, 2), (4, 9), (5, 20)],
    ),
    "dualpipe_v": (ScheduleDualPipeV, 2, True, [(2, 4), (2, 7), (3, 6), (3, 8), (4, 8), (5, 13), (6, 12)]),
}


@pytest.mark.parametrize("scheduler", SPLIT)
def test_orders_with_a_split_backward_are_torchs_action_for_action(scheduler: str) -> None:
    kind, chunks, v, shapes = SPLIT[scheduler]
    for ranks, micros in shapes:
        assert schedules.build(scheduler, ranks, chunks, micros) == of_torch(kind, ranks, chunks, micros, v)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("scheduler", [*schedules.RULES, "forward only", "forward only there and back"])
def test_torchs_runtime_takes_ours_and_finds_no_deadlock(scheduler: str, chunks: int, ranks: int) -> None:
    rule = schedules.RULES.get(scheduler)
    v = ranks > 1 and (scheduler == "forward only there and back" or (rule is not None and rule.v))
    if rule is not None and ranks > 1:
        chunks = 1 if rule.single else 2 if rule.v else max(chunks, 2) if rule.several else chunks
    elif rule is not None and (rule.single or rule.v or rule.seq):
        chunks = 1
    places = schedules.placement(ranks, chunks, v)
    with one_of(ranks) as group:
        parts: list[Any] = list(stages(places, group))  # lowering reads only their numbers
        for micros in range(len(places) if rule is not None and rule.full else ranks, 2 * ranks + 4):
            if rule is None:
                ours = schedules.forward_only(places, micros)
            else:
                ours = schedules.build(scheduler, ranks, chunks, micros)
            run = pipelining.runtime(parts, ours, micros, nn.functional.mse_loss)
            order = run.pipeline_order_with_comms
            assert as_lowered(order, places, ranks) == ours
            for way in (SEND_F, SEND_B), (RECV_F, RECV_B):
                messages = sum(a.computation_type in way for row in order.values() for a in row)
                assert messages == simulated(ours, ranks, chunks, v).messages


def as_lowered(order: dict[int, list[_Action]], places: tuple[int, ...], ranks: int) -> Schedule:
    """Return the compute actions that remain when torch's own check has run its sends, receives and actions."""
    messages = ("SEND", "RECV", "WAIT_SEND")  # the last since torch 2.15
    known = {
        r: [a for a in row if a.is_compute_op or a.computation_type.name.startswith(messages)]
        for r, row in order.items()
    }
    ran = _simulate_comms_compute(known, lambda stage: places[stage], len(places))
    return tuple(
        tuple(
            Action(a.stage_index, a.computation_type.value, a.microbatch_index)
            for a in ran[r]
            if a is not None and a.is_compute_op
        )
        for r in range(ranks)
    )
