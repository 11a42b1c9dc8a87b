"""Grow the corpus that ``test_corpus`` replays: change bytes at random and keep inputs that reach new code.

    python -m tests.checkpoint.fuzz.grow [--seconds 600] [--seed 0] [READER ...]

The readers take turns. Each starts from its real files and from its corpus. The new corpus is a small set of inputs,
shorter ones first, that together reach every pair of lines that any input reached. An input that raises an
unexpected error or takes more than two seconds or 1 GiB is printed, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from tests.checkpoint.fuzz.readers import READERS, Reader, keep, kept, outcome

LONGEST = 4096  # bytes; longer inputs reach nothing more
SECONDS, MOST, TURNS = 2, 1 << 30, 20
TRACED = ("/launcher/", "/pickle.py", "/zipfile.py")
NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 20, 2**31, 2**32 - 1, 2**40, 2**63, 10**30, 0.5, float("nan"), float("inf"))
WORDS = ("", "../w", "/etc/passwd", "w", "F32", "BF16", "float32", "pp", "tp", "rank_0", "env:NO_SUCH_KEY", "é", "\0")
VALUES = (*NUMBERS, *WORDS, None, True, [], {}, [0], [2, 3], [[0, 24]], {"w": 1})
BYTES = (b"\0", b"\xff", b"\xff" * 9 + b"\x01", b"\x80" * 12, b"crc_num", b"\x7f", (1 << 40).to_bytes(8, "little"))

Edge = tuple[str, int, int]
Edges = frozenset[Edge]


class Slow(Exception):
    """The reader takes too long."""


def went(reader: Reader, folder: Path, data: bytes) -> Edges:
    """The pairs of successive lines in our code. Raises what ``outcome`` raises, and ``Slow``."""
    edges: set[Edge] = set()

    def call(frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in TRACED):
            return None
        last = 0

        def line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal last
            edges.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line

    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    sys.settrace(call)
    try:
        outcome(reader, folder, data)
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return frozenset(edges)


def changed(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """``data`` with some bytes replaced, removed, inserted, repeated, or taken from another input."""
    if rng.random() < 0.5 and (new := _json(rng, data)) is not None:
        return new
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(0, len(data))
        end = min(len(data), at + rng.choice((0, 1, 1, 1, 2, 4, 8, 64)))
        other = rng.choice(others)
        start = rng.randint(0, len(other))
        data = data[:at] + _piece(rng, data[at:end], other[start : start + rng.choice((1, 8, 64))]) + data[end:]
    return data[: rng.randint(0, len(data)) if rng.random() < 0.1 else LONGEST]


def _piece(rng: random.Random, old: bytes, other: bytes) -> bytes:
    flipped = bytes(b ^ (1 << rng.randint(0, 7)) for b in old)
    return rng.choice((flipped, flipped, b"", old * 2, rng.choice(BYTES), rng.randbytes(len(old) or 1), other))


def _json(rng: random.Random, data: bytes) -> bytes | None:
    """``data`` with one value or key of its JSON replaced, also in a safetensors header; ``None`` if it has none."""
    head = 8 if data[8:9] == b"{" else 0
    length = int.from_bytes(data[:8], "little") if head else len(data)
    try:
        root = json.loads(data[head : head + length])
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2))):
        holders = [*_holders(root)]
        if not holders:
            return None
        holder = rng.choice(holders)
        key: Any = rng.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        match rng.randint(0, 4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(WORDS)] = holder.pop(key)
            case 2:
                holder[key] = rng.choice([json.loads(json.dumps(h)) for h in holders])
            case 3 if isinstance(holder[key], int):
                holder[key] += rng.choice((-1, 1, 4, 8))
            case _:
                holder[key] = rng.choice(VALUES)
    text = json.dumps(root, ensure_ascii=False).encode("utf-8", "replace")
    return len(text).to_bytes(8, "little") * bool(head) + text + data[head + length :]


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


def fewest(found: dict[bytes, Edges]) -> list[bytes]:
    """A greedy choice: always the input with the most pairs of lines that are new, the shorter of two."""
    seen: set[Edge] = set()
    chosen = []
    while left := {data: len(edges - seen) for data, edges in found.items() if not edges <= seen}:
        chosen.append(min(left, key=lambda data: (-left[data], len(data), data)))
        seen |= found[chosen[-1]]
    return chosen


class Garden:
    """The inputs of one reader, and the lines that each reached; for encrypted ones also the plain text."""

    def __init__(self, name: str, home: Path, rng: random.Random) -> None:
        self.name, self.reader, self.folder, self._rng = name, READERS[name], home / name, rng
        self.folder.mkdir()
        self.reader.make(self.folder)
        self.found: dict[bytes, Edges] = {}
        self.seen: set[Edge] = set()
        self.broken: dict[str, bytes] = {}
        self.runs = 0
        self._plain: dict[bytes, bytes] = {}
        seeds = self.reader.seeds(self.folder)
        outcome(self.reader, self.folder, self._sealed(seeds[0]))  # what only a first call does belongs to no input
        for data in [*map(self._sealed, seeds), *kept(name)]:
            self.plant(data)

    def plant(self, data: bytes) -> None:
        """Run it, and keep it if it reached a new pair of lines."""
        self.runs += 1
        try:
            edges = went(self.reader, self.folder, data)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__} at {at.filename}:{at.lineno}: {error}"
            if self.broken.setdefault(told[:80], data) is data:
                print(f"{self.name}: {told}\n{base64.b85encode(data).decode()}", file=sys.stderr)
            return
        if not edges <= self.seen:
            self.seen |= edges
            self.found[data] = edges

    def turn(self, seconds: float) -> None:
        """Change inputs in many ways, the newest inputs more often."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            inputs = [*self.found]
            data = self._rng.choice(inputs[-10:] if self._rng.random() < 0.5 else inputs)
            if (plain := self._plain.get(data)) is not None and self._rng.random() < 0.7:
                self.plant(self._sealed(changed(self._rng, plain, [*self._plain.values()])))
            else:
                self.plant(changed(self._rng, data, inputs))

    def _sealed(self, data: bytes) -> bytes:
        if self.reader.seal is None:
            return data
        sealed = self.reader.seal(self.folder, data)
        self._plain[sealed] = data
        return sealed


def main() -> int:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--seconds", type=float, default=600)
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("readers", nargs="*", metavar="READER", help=", ".join(READERS))
    given = args.parse_args()
    names = given.readers or [*READERS]
    signal.signal(signal.SIGPROF, _too_slow)
    with TemporaryDirectory() as home:
        gardens = [Garden(name, Path(home), random.Random(given.seed)) for name in names]
        resource.setrlimit(resource.RLIMIT_DATA, (_memory() + MOST, resource.RLIM_INFINITY))
        for turn in range(TURNS):
            for garden in gardens:
                garden.turn(given.seconds / TURNS / len(gardens))
            told = ", ".join(f"{g.name} {len(g.found)}" for g in gardens)
            print(f"turn {turn + 1} of {TURNS}: {told}", flush=True)
    for garden in gardens:
        chosen = fewest(garden.found)
        keep(garden.name, chosen)
        size = sum(map(len, chosen))
        print(f"{garden.name}: {garden.runs} runs, {len(garden.seen)} edges, kept {len(chosen)} inputs, {size} bytes")
    return 1 if any(garden.broken for garden in gardens) else 0


def _too_slow(signum: int, frame: object) -> None:
    raise Slow(f"more than {SECONDS} s")


def _memory() -> int:
    """Bytes of data that this process uses."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
