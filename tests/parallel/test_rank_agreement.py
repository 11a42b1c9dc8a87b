"""A rank that builds or traces another model than its peers is detected before training begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.parallel.deferred_init import fill
from launcher.parallel.deferred_init.constructor import record
from launcher.parallel.deferred_init.tape import Tape
from launcher.parallel.rank_agreement import check_agreement
from launcher.parallel.stages import StagePart
from launcher.plan.cut.stages import Stage
from launcher.runtime.faults import RanksFailed
from tests.ranks import here

WHY = "depends on something that differs between processes, such as the order of a set of strings; sort the set, or "
WHY += "start all ranks with the same PYTHONHASHSEED"
STAGE = Stage(index=0, nodes=(), receives=(), sends=(), modules=(), params=(), flops=0, saved=0)


class Ordered(nn.Module):
    """Layers made in the order of ``names`` but stored by name; ``cached``: a buffer from an earlier draw."""

    def __init__(self, names: list[str], cached: torch.Tensor | None = None) -> None:
        super().__init__()
        made = {name: nn.Linear(4, 4) for name in names}
        self.layers = nn.ModuleDict({name: made[name] for name in sorted(made)})
        self.register_buffer("table", torch.arange(4.0) if cached is None else cached + 0.0)


def making(*args: object) -> fill.InitialTensors:
    model, tape = record(lambda: Ordered(*args), 3)  # type: ignore[arg-type]
    return fill.InitialTensors(tape, {n: t.detach() for n, t in fill.tensors(model).items()})


def unrecorded_tensors(names: list[str]) -> fill.InitialTensors:
    torch.manual_seed(3)
    real = fill.tensors(Ordered(names))
    tape = Tape()
    tape.why = "cannot be recorded"
    return fill.InitialTensors(tape, real, lambda: real)


def part(*code: str) -> list[StagePart]:
    return [StagePart(STAGE, nn.Module(), code=code)]


def test_ranks_that_do_the_same_are_alike():
    here(lambda w: check_agreement(part("a = a(x)"), making(["down", "up"])), 2)


def test_the_same_numbers_made_in_another_way_are_alike():
    cached = torch.arange(4.0)
    here(lambda w: check_agreement(part(), making(["down", "up"], cached if w.rank else None)), 2)


@pytest.mark.parametrize("made", [making, unrecorded_tensors])
def test_weights_made_in_another_order_are_told(made):
    with pytest.raises(RanksFailed) as failed:
        here(lambda w: check_agreement(part(), made(["down", "up"][:: 1 - 2 * w.rank])), 2)
    rank = failed.value.fault.rank
    text = f"the initial values of layers.down.bias on rank {1 - rank} differ from those on rank {rank}: "
    text += "the constructor "
    assert failed.value.fault.message == text + WHY


def test_code_that_goes_another_way_is_told():
    with pytest.raises(RanksFailed) as failed:
        here(lambda w: check_agreement(part("a = a(x)", *["b = b(a)"] * w.rank), making(["up"])), 2)
    text = "the code between the named modules is 'nothing' on rank 0 and 'b = b(a)' on rank 1: the forward "
    assert failed.value.fault.message == text + WHY
