"""Checks that items of a user's data set are the same each time they are read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from launcher.data.source import Dataset, Source
from launcher.data.torch_datasets.items import BadItem, collated, problems
from launcher.data.torch_datasets.open import KEY
from launcher.data.torch_datasets.readers import IndexedStream, MapStyle, global_generators
from launcher.errors import Problem
from launcher.user_counters import MANY, integers, set_integers

ITEMS, TIMES = 4, 4
"""The number of items that are read, and how often. A coin toss per item is missed once in 4000 times."""
BATCH = 24
"""The number of samples of a ``Source`` that are read together, as some classes sort large batches."""
LATER = 32
"""The number of items of a stream that are read twice: some depend on the time after their first ones."""
SPREAD = 12
"""The number of items all over the data set that are read twice: some classes change few of their items."""


DRAW = (
    "draw from the global random streams of torch, numpy or Python, which are seeded by (seed, epoch, item)"
)


STEADY = (
    "a Source returns samples by index alone: draw from a generator that the index seeds, or write a "
    "torch Dataset, whose draws from the global random streams are seeded by (seed, epoch, item)"
)


def unsteady(one: Dataset, other: Dataset) -> Iterator[Problem]:
    """Yields a problem if items differ when this rank or another one reads them again.

    ``one`` and ``other`` are the same request, opened twice. Raises ``RequestError``.
    """
    for mine, theirs in ((one.train, other.train), (one.val, other.val)):
        with problems():
            problem = _unsteady(mine, theirs)
        if problem is not None:
            yield problem
            return


def unsteady_source(name: str, mine: Source, theirs: Source) -> Iterator[Problem]:
    """Yields a problem if samples of a user's ``Source`` depend on anything but their index.

    ``theirs`` is the same request, opened again: each rank builds its own, and reads other samples with it.
    """
    n = min(ITEMS, len(mine))
    every = np.arange(n)
    with suppress(Exception), global_generators() as put:  # the run reports what the class raises
        put(0)
        once = [*mine.inputs(every), mine.targets(every)]
        if any(len(t) != n for t in once):
            return
        rows = [[t[i : i + 1].clone() for t in once] for i in range(n)]
        for seed in range(1, TIMES):
            put(seed)
            again = _read(mine, n)
            back = [*theirs.inputs(every[::-1].copy()), theirs.targets(every[::-1].copy())]
            backward = [[t[n - 1 - i : n - i] for t in back] for i in range(n)]
            others: tuple[tuple[Sequence[Sequence[Tensor]], str], ...]
            others = ((again, "is read again, alone"), (backward, "is read by another rank"))
            for other, how in others:
                if any(len(t) != 1 for row in other for t in row):
                    return
                at = _differs(rows, other)
                if at is not None:
                    text = f"sample {at} differs when it {how}, so no two layouts would train the same"
                    yield Problem(KEY, f"{name}: {text}; {STEADY}")
                    return
        if (at := _differs_in_batch(mine)) is not None:
            text = f"sample {at} differs when more samples are read with it"
            yield Problem(KEY, f"{name}: {text}, so no two layouts would train the same; {STEADY}")
        elif why := _counting(mine, mine):
            yield Problem(KEY, f"{name}: {why}; {STEADY}")


def _unsteady(mine: Source, theirs: Source) -> Problem | None:
    if not isinstance(mine, MapStyle | IndexedStream) or not len(mine):
        return None
    n = min(ITEMS, len(mine))
    first = _read(mine, n)
    for _ in range(TIMES - 1) if isinstance(mine, MapStyle) else ():
        at = _differs(first, _read(mine, n))
        if at is not None:
            text = f"item {at} differs when it is read again, so no two layouts would train the same"
            return Problem(KEY, f"{mine.name}: {text}; {DRAW}")
    if isinstance(mine, MapStyle) and (at := _differs_in_spread(mine)) is not None:
        text = f"item {at} differs when it is read again, so no two layouts would train the same"
        return Problem(KEY, f"{mine.name}: {text}; {DRAW}")
    at = _differs(first, _read(theirs, n))
    if at is not None:
        text = f"built a second time, its item {at} differs, and each rank builds its own copy"
        return Problem(KEY, f"{mine.name}: {text}; {DRAW}; in its constructor, they are seeded by the seed")

    # read together, after many others, and as a DataLoader and a resumed run do
    every = np.arange(n)
    together = [*mine.inputs(every), mine.targets(every)]
    at = _differs(first, [[t[i : i + 1] for t in together] for i in range(n)])
    if at is not None:
        text = f"item {at} differs when others are read after it, so no two layouts would train the same"
        return Problem(KEY, f"{mine.name}: {text}; return a new tensor or array for each item")
    if isinstance(mine, MapStyle) and (why := _counting(mine, mine.dataset)):
        return Problem(KEY, f"{mine.name}: {why}; {BY_EPOCH}")
    if isinstance(mine, MapStyle) and (why := _batched(mine, n)):
        return Problem(KEY, f"{mine.name}: {why}")
    if not isinstance(mine, IndexedStream) or n == 1:
        return None
    return _lost(mine, first) or _late(mine, theirs)


def _differs_in_batch(source: Source) -> int | None:
    """Returns the index of a sample that differs in a larger batch; ``None`` if all are the same."""
    every = np.arange(min(BATCH, len(source)))[::-1].copy()
    together = [*source.inputs(every), source.targets(every)]
    rows = [[t[i : i + 1].clone() for t in together] for i in range(len(every))][::-1]
    return _differs(rows, _read(source, len(every)))


def _differs_in_spread(source: MapStyle) -> int | None:
    """Returns the number of an item that differs when it is read again, out of some all over the data set."""
    for place in dict.fromkeys(np.linspace(0, len(source) - 1, SPREAD).astype(int).tolist()):
        row = np.array([place])
        with suppress(BadItem):  # the run reports it, if it reads the item
            once, again = ([*source.inputs(row), source.targets(row)] for _ in range(2))
            if not all(map(_same, once, again)):
                return int(source.part[place])
    return None


def _counting(source: Source, instance: object) -> str:
    """Returns why items depend on how many have been read before, if ``instance`` counts them."""
    n = min(ITEMS, len(source))
    before = integers(instance)
    try:
        first = _read(source, n)
        counters = {
            key: number for key, number in integers(instance).items() if before.get(key, number) != number
        }
        for many in MANY if counters else ():
            set_integers(instance, {key: number + many for key, number in counters.items()})
            at = _differs(first, _read(source, n))
            if at is not None:
                names = ", ".join(name for _, name in counters)
                text = f"it counts what it reads ({names}), and item {at} changes after more of them"
                return f"{text}; each layout and a resumed run read another number of items"
    finally:
        set_integers(instance, before)
    return ""


BY_EPOCH = "use the index, or the epoch, which the launcher passes to set_epoch(epoch)"


def _batched(source: MapStyle, n: int) -> str:
    """Returns why a ``DataLoader`` would read other items: by ``__getitems__``, if the class has it."""
    dataset, numbers = source.dataset, source.part[:n].tolist()
    if not callable(getattr(dataset, "__getitems__", None)):
        return ""
    with suppress(Exception), global_generators() as put:  # a run never calls it
        put(0)
        streams = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        pairs = [list(zip(numbers, items, strict=True)) for items in (
            [dataset[i] for i in numbers], dataset.__getitems__(numbers),
        )]  # fmt: skip
        after = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        if not torch.equal(streams[0], after[0]) or streams[1:] != after[1:]:
            return ""  # each way draws other numbers
        one, other = (collated(source.name, each) for each in pairs)
        if not all(map(_same, one, other)):
            text = "its __getitems__, which a DataLoader calls, returns other items than its __getitem__"
            return f"{text}, which the launcher calls; let both return the same"
    return ""


def _late(mine: IndexedStream, theirs: Source) -> Problem | None:
    """Returns a problem if a later item of a stream differs on another rank, or in a restored stream."""
    assert isinstance(theirs, IndexedStream)
    n = min(LATER, len(mine))
    try:
        once, again = _read(mine.anew(), n), _read(theirs.anew(), n)
    except BadItem:  # the run reports it, if it reads the item
        return None
    at = _differs(once, again)
    if at is not None:
        text = f"built a second time, its item {at} differs, and each rank builds its own copy"
        return Problem(KEY, f"{mine.name}: {text}; {DRAW}; in its constructor, they are seeded by the seed")
    return _lost(mine, once)


def _lost(stream: IndexedStream, items: list[Sequence[Tensor]]) -> Problem | None:
    """Returns a problem if a stream that is restored from its ``state_dict`` gives other items."""
    half = len(items) // 2
    one, other = stream.anew(), stream.anew()
    _read(one, half)
    place = one.place()
    if place is None:
        return None
    other.go_on(place)
    at = _differs(items[half:], _read(other, len(items), first=half))
    if at is None:
        return None
    text = f"restored from its state_dict after {half} items, it continues with a different item {half + at}"
    cure = (
        "save everything in it that the next items depend on, or remove it: a resumed run then reads the "
        "stream from its start"
    )
    return Problem(KEY, f"{stream.name}: {text}; {cure}")


def _read(source: Source, n: int, first: int = 0) -> list[Sequence[Tensor]]:
    """Reads the items from ``first`` up to ``n``, one by one."""
    rows = [np.arange(i, i + 1) for i in range(first, n)]
    return [(*source.inputs(row), source.targets(row)) for row in rows]


def _differs(a: Sequence[Sequence[Tensor]], b: Sequence[Sequence[Tensor]]) -> int | None:
    """Returns the index of the first item that is not bitwise equal; ``None`` if all are."""
    for at, (one, other) in enumerate(zip(a, b, strict=True)):
        if len(one) != len(other) or not all(map(_same, one, other)):
            return at
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(
        torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )
