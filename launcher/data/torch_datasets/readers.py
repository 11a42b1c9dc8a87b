"""Reads items of users' torch data sets, in order or by index."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from launcher.data.shuffle import Indices
from launcher.data.torch_datasets.items import BadItem, Items, call_user

Seed = Callable[..., None]


@contextmanager
def global_generators() -> Iterator[Seed]:
    """Yields a function that seeds Python, numpy and torch (CPU) by a key, and restores their states."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield _seed
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _seed(seed: int, *key: int) -> None:
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(2, np.uint32)
    first, second = words.tolist()
    random.seed(first << 32 | second)
    np.random.seed(first)
    torch.default_generator.manual_seed(first << 31 | second >> 1)  # not the generators of other devices


ENDLESS = 1 << 62
"""The length of a stream without ``__len__``."""
LONGEST = 1 << 20
"""The most characters of a state, which is saved in the metadata of checkpoints."""
METHODS = ("state_dict", "load_state_dict")


class IndexedStream(Items):
    """Index ``i`` is the ``i``-th item of an iterator over ``make()``; each rank reads all items up to it.

    To go back, it builds the data set again and reads it from the start. The numbers that an item draws from
    the global generators depend only on ``key`` and its index. ``request`` is a text that identifies
    everything that the items depend on. A stream is read once, so a ``set_epoch`` of the data set is called
    with 0 before its iterator is made, as a plain loop does.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        key: tuple[int, ...],
        length: int = ENDLESS,
        request: str = "",
    ) -> None:
        super().__init__(name)
        self.make, self.key, self.length = make, key, length
        self.request = request
        self._made: Any = None
        self._items: Iterator[Any] = iter(())
        self._done = 0
        self._last: Any = _END
        self._begun = False

    def __len__(self) -> int:
        return self.length

    def items(self, indices: Indices) -> list[tuple[int, Any]]:
        by_place: dict[int, Any] = {}
        with global_generators() as seed:
            for place in sorted({*indices.tolist()}):
                by_place[place] = self._at(place, seed)
        return [(place, by_place[place]) for place in indices.tolist()]

    def _at(self, place: int, seed: Callable[..., None]) -> Any:
        """Returns an item. It keeps the last one, because the padding of a batch repeats it."""
        if not self._begun or place < self._done - (self._last is not _END):
            self._begin(seed)
        while self._done <= place:
            seed(*self.key, 1, self._done)
            item = call_user(self.name, f"item {self._done}", self._next)
            if item is _END:
                self._ended(place)
            self._last = item
            self._done += 1
        return self._last

    def _begin(self, seed: Callable[..., None], state: Any = None) -> None:
        """Begins at the first item, or at the item at which ``state`` was saved."""
        seed(*self.key, 0)
        self._made = self.make()
        if callable(set_epoch := getattr(self._made, "set_epoch", None)):
            call_user(self.name, "its set_epoch(0)", partial(set_epoch, 0))
        if state is not None and _stateful(self._made):
            call_user(self.name, "its load_state_dict", lambda: self._made.load_state_dict(state))
        self._items = items = call_user(self.name, "its iterator", lambda: iter(self._made))
        if state is not None and not _stateful(self._made):
            call_user(self.name, "its load_state_dict", lambda: items.load_state_dict(state))
        self._begun, self._done, self._last = True, 0, _END

    def anew(self) -> IndexedStream:
        return IndexedStream(self.make, self.name, self.key, self.length, self.request)

    def place(self) -> dict[str, Any] | None:
        """Returns the position for ``go_on``, in JSON; ``None`` if no position can be saved.

        It comes from the data set or its iterator, by ``state_dict`` and ``load_state_dict``, as torchdata
        defines them.
        """
        known: tuple[Any, ...] = (self._made, self._items)
        one = next((one for one in known if _stateful(one)), None)
        if one is None or not self._begun:
            return None
        state = call_user(self.name, "its state_dict", one.state_dict)
        try:
            text = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return None
        if len(text) > LONGEST:
            return None
        return {"request": self.request, "items": self._done, "state": json.loads(text)}

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Continues at ``place`` if it is of the same request; otherwise, reading begins at the start."""
        items = place.get("items")
        if place.get("request") != self.request or not isinstance(items, int):
            return
        with global_generators() as seed:
            self._begin(seed, place.get("state"))
        self._done = items

    def _next(self) -> Any:
        return next(self._items, _END)

    def _ended(self, place: int) -> None:
        n, self._begun = self._done, False
        text = f"the stream ended after {n} items, but item {place} (from 0) is needed"
        cure = f"let it start over by itself, or set train.steps to at most {n} // train.batch_size"
        raise BadItem(self.name, f"{text}; {cure}")


def _stateful(one: Any) -> bool:
    return all(callable(getattr(one, name, None)) for name in METHODS)


_END = object()


class MapStyle(Items):
    """The items ``part`` of ``dataset``; index ``i`` is sample ``i % len`` in epoch ``i // len``.

    The numbers that an item draws from the global generators depend only on ``key``, the epoch and the item,
    not on the process or the order of reading. A ``set_epoch`` of ``dataset`` is called with the epoch of the
    next item.
    """

    def __init__(self, dataset: Any, part: Indices, name: str, key: tuple[int, ...]) -> None:
        super().__init__(name)
        self.dataset, self.part, self.key = dataset, part, key

    def __len__(self) -> int:
        return len(self.part)

    def items(self, indices: Indices) -> list[tuple[int, Any]]:
        out, set_epoch, last = [], getattr(self.dataset, "set_epoch", None), None
        with global_generators() as seed:
            for i in indices.tolist():
                epoch, at = divmod(i, len(self.part))
                number = int(self.part[at])
                if callable(set_epoch) and epoch != last:
                    call_user(self.name, f"its set_epoch({epoch})", partial(set_epoch, epoch))
                    last = epoch
                seed(*self.key, epoch, number)
                item = call_user(self.name, f"item {number}", partial(self.dataset.__getitem__, number))
                out.append((number, item))
        return out
