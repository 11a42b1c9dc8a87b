"""The random streams of a constructor: the seed of each, and the place of each recorded draw in one."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


def stream(seed: int, name: str) -> int:
    """Returns the seed of the random stream of ``name``: 63 bits of blake2b."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch, ``random`` and numpy, as ``manual_seed`` does, and restores their states afterwards.

    torch's generator of the CPU is seeded, but no GPU's: a process that will fork must not touch a GPU.
    """
    numpy = getattr(sys.modules.get("numpy"), "random", None)  # numpy imports it when it is first used
    python = random.getstate()
    legacy = numpy.get_state() if numpy else None

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.set_state(legacy)


@dataclass(eq=False)
class Seeded:
    """A stream that the constructor seeded itself: its draws follow one another.

    ``states`` has the generator's state before each draw, as far as known. ``places`` has the place of the
    operation of each draw.
    """

    states: dict[int, torch.Tensor]
    places: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """The ``at``-th draw from ``root``; ``None`` is the run's seed, where each draw has its own stream."""

    root: Seeded | None
    at: int


class Streams:
    """Follows the states of generators.

    Each recorded draw advances its generator by one number, so that the states of two draws differ. Thus
    ``manual_seed``, generators, ``fork_rng`` and restored states mean the same as in a plain build.
    """

    def __init__(self, seed: int) -> None:
        self._any: dict[bytes, Draw] = {_print(torch.Generator().manual_seed(seed)): Draw(None, 0)}
        self._next: dict[tuple[int, bytes], Draw] = {}
        self._kept: list[torch.Generator] = []  # the address of a freed generator could be reused

    def draw(self, generator: torch.Generator | None) -> Draw:
        """Returns the next draw from ``generator``; ``None`` is the default one."""
        generator = torch.default_generator if generator is None else generator
        now = _print(generator)
        draw = self._next.get((_address(generator), now)) or self._any.get(now)
        if draw is None or (
            draw == Draw(None, 0) and _address(generator) != _address(torch.default_generator)
        ):
            draw = Draw(Seeded({0: generator.get_state()}), 0)  # also one that is seeded like the run
        torch.rand(1, generator=generator)

        self._kept.append(generator)
        after = Draw(draw.root, draw.at + 1)
        self._next[_address(generator), _print(generator)] = self._any[_print(generator)] = after
        return draw

    @property
    def has_own(self) -> bool:
        """True if a draw was not from torch's default generator."""
        return any(_address(g) != _address(torch.default_generator) for g in self._kept)

    def next_of(self, generator: torch.Generator) -> Draw | None:
        """Returns the next draw from ``generator``; ``None`` if no draw has led to its state."""
        return self._next.get((_address(generator), _print(generator)))


def _address(generator: torch.Generator) -> int:
    """Returns the address of a generator, of which Python may have several objects."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def _print(generator: torch.Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()
