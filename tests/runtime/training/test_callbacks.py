"""A callback's random numbers are its own."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launcher.errors import RunError
from launcher.runtime.cluster.world import World
from launcher.runtime.training.callbacks import Callbacks
from tests.ranks import on_ranks


class Draws:
    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_step(self, event: Any) -> None:
        torch.manual_seed(event.step)
        self.numbers += [torch.rand(()).item(), random.random(), np.random.rand()]


def test_draws_and_seeds_of_a_callback_do_not_change_the_streams_of_the_training() -> None:
    draws = Draws()
    callbacks = Callbacks([("draws", draws)], steps=3, folder=Path(), rank=0, device=torch.device("cpu"))
    torch.manual_seed(7)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    callbacks.call("on_step", 1, {"loss": 1.0, "lr": 0.1})
    assert len(draws.numbers) == 3
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(np.random.get_state()))


class Averages:
    """Takes the mean of the loss over the ranks, and says how many there are; ``how``: which collective."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step(self, event: Any) -> None:
        loss = torch.tensor(event.loss / dist.get_world_size())
        if self.how == "reduce":
            dist.all_reduce(loss)
        elif self.how == "hidden":
            with suppress(Exception):
                dist.barrier()
        elif self.how == "object":
            dist.broadcast_object_list([event.loss])
        self.loss = loss.item()


class AveragesEverywhere(Averages):
    every_rank = True


def averaged(kind: type[Averages], how: str) -> list[Any]:
    """For each rank the loss that a callback averages, or its error."""

    def on_rank(world: World) -> Any:
        one, rank = kind(how), world.rank
        here = [("it", one)] if rank == 0 or kind is AveragesEverywhere else []
        callbacks = Callbacks(here, steps=3, folder=Path(), rank=rank, device=torch.device("cpu"))
        try:
            callbacks.call("on_step", 1, {"loss": 1.0 + rank, "lr": 0.1})
        except RunError as error:
            return str(error)
        return getattr(one, "loss", None)

    return on_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("how", "function"), [("reduce", "all_reduce"), ("hidden", "barrier"), ("object", "broadcast_object_list")]
)
def test_a_collective_in_a_hook_of_one_rank_ends_the_run_and_does_not_hang(how: str, function: str) -> None:
    text = (
        f"it.on_step calls torch.distributed.{function}(), but it runs on rank 0 only, which would wait for the others"
    )
    cure = "set every_rank = True in the class: then each rank creates it and calls its hooks"
    assert averaged(Averages, how) == [f"{text}; {cure}", None]


def test_a_class_of_every_rank_may_call_collectives_and_any_may_ask_for_its_rank() -> None:
    assert averaged(AveragesEverywhere, "reduce") == [1.5, 1.5]
    assert averaged(Averages, "none") == [0.5, None]


def test_attributes_that_a_callback_changes_are_noted_once() -> None:
    callbacks = Callbacks([("draws", Draws())], steps=3, folder=Path(), rank=0, device=torch.device("cpu"))
    assert callbacks.unsaved() == []
    callbacks.call("on_step", 1, {})
    assert callbacks.unsaved() == [
        "draws has changed numbers; no checkpoint contains it, so a resumed run resets it; if that matters, write it "
        "to a file in event.folder and read it in on_start"
    ]
    callbacks.call("on_step", 2, {})
    assert callbacks.unsaved() == []
