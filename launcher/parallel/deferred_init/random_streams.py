"""Says which draw of which random stream each random operation of a constructor is."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


def stream(seed: int, name: str) -> int:
    """The seed of a random stream of its own: 63 bits of blake2b."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch, ``random`` and numpy draw from ``seed``, as after ``manual_seed``; then from where they were.

    Only torch's generator of the CPU: a GPU's must not be touched by a process that will fork.
    """
    numpy = getattr(sys.modules.get("numpy"), "random", None)  # which numpy imports when it is first used
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
    """A stream that the constructor seeded itself: its numbers are those, one draw after the other.

    ``states`` before the draws so far known, ``places`` of the operations that draw.
    """

    states: dict[int, torch.Tensor]
    places: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """The ``at``-th draw from ``root``; ``None`` is the run's seed, where each draw has its own stream."""

    root: Seeded | None
    at: int


class Streams:
    """Follows the states of generators, which a recorded draw moves by one number for them to be told apart.

    So ``manual_seed``, generators, ``fork_rng`` and states that are set back mean what they mean in a plain
    build.
    """

    def __init__(self, seed: int) -> None:
        self._any: dict[bytes, Draw] = {_print(torch.Generator().manual_seed(seed)): Draw(None, 0)}
        self._next: dict[tuple[int, bytes], Draw] = {}
        self._kept: list[torch.Generator] = []  # an id is another's once it is gone

    def draw(self, generator: torch.Generator | None) -> Draw:
        """The next draw from ``generator``, the default one for ``None``."""
        generator = torch.default_generator if generator is None else generator
        now = _print(generator)
        draw = self._next.get((id(generator), now)) or self._any.get(now)
        draw = draw or Draw(Seeded({0: generator.get_state()}), 0)
        torch.rand(1, generator=generator)

        self._kept.append(generator)
        after = Draw(draw.root, draw.at + 1)
        self._next[id(generator), _print(generator)] = self._any[_print(generator)] = after
        return draw


def _print(generator: torch.Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()
