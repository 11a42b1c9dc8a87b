"""Finds modules that draw from a random stream which another module seeds: stages do not share the seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from launcher.parallel.model_state.python_state import generator_state
from launcher.parallel.trace.python_streams import streams_kept, streams_now

_SEEDS = itertools.count(1)


@dataclass(frozen=True)
class _States:
    """The states of the global random streams of Python, numpy, and torch on the CPU."""

    python: Any
    numpy: Any
    torch: bytes


class LeafStreams:
    """The global random streams in one forward: ``calls`` has their states before and after each leaf.

    Each leaf begins with new seeds, and so does the code after it, which has the name "".
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, _States, _States]] = []
        self._begin = _states()

    def start(self) -> None:
        """Notes that the forward starts."""
        self._begin = _new_seeds()

    def begin(self) -> None:
        """Notes that a leaf begins."""
        self.over()
        self._begin = _new_seeds()

    def end(self, leaf: str) -> None:
        """Notes that ``leaf`` ends."""
        self._note(leaf)
        self._begin = _new_seeds()

    def over(self) -> None:
        """Notes that the code between two leaves ends."""
        self._note("")

    def _note(self, leaf: str) -> None:
        self.calls.append((leaf, self._begin, _states()))


def draws_of_python(first: LeafStreams, again: LeafStreams) -> bool:
    """Returns true if a forward draws from Python's or numpy's stream, which the same code has not seeded.

    ``first`` and ``again`` are two forwards of the same model. Code that seeds a stream before it draws ends
    with the same state both times.
    """
    calls = zip(first.calls, again.calls, strict=False)
    return any(
        begin.python != end.python != other.python or begin.numpy != end.numpy != other.numpy
        for (_, begin, end), (_, _, other) in calls
    )


def seeds_of_torch(first: LeafStreams, again: LeafStreams) -> tuple[str, ...]:
    """Returns the leaves that seed torch's stream; "" for the code between leaves."""
    calls = zip(first.calls, again.calls, strict=False)
    seeded = [leaf for (leaf, begin, end), (_, _, other) in calls if begin.torch != end.torch == other.torch]
    return tuple(dict.fromkeys(seeded))


@contextmanager
def global_streams_kept() -> Iterator[None]:
    """Restores the global random streams of Python, numpy and torch's CPU on exit."""
    with streams_kept(), torch.random.fork_rng(devices=[]):
        yield


def _states() -> _States:
    python, *numpy = streams_now()
    return _States(python, numpy, generator_state(torch.default_generator))


def _new_seeds() -> _States:
    """Seeds the streams as they have not been seeded before, and returns their states."""
    seed = next(_SEEDS)
    random.seed(f"leaf {seed}")
    np.random.seed([seed, 1])
    torch.default_generator.manual_seed((seed << 32) + 1)
    return _states()
