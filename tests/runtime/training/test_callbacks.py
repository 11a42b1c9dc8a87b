"""A callback's random numbers are its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launcher.runtime.training.callbacks import Callbacks


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
