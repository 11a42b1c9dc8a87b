"""A torch ``IterableDataset``: samples in its own order, as many as it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from launcher.data.shuffle import Indices
from launcher.data.torch_datasets.items import BadItem, Items, asked
from launcher.data.torch_datasets.random_state import global_generators

ENDLESS = 1 << 62
"""The length of a stream that does not say its own."""


class Stream(Items):
    """Index ``i`` is the ``i``-th item of the iterator of what ``make`` makes; each rank reads all up to it.

    Going back means to make it and to read it anew. What an item draws from the global generators hangs on
    ``key`` and its place.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, key: tuple[int, ...], length: int = ENDLESS
    ) -> None:
        super().__init__(name)
        self.make, self.key, self.length = make, key, length
        self._items: Iterator[Any] = iter(())
        self._done = 0
        self._last: Any = None
        self._begun = False

    def __len__(self) -> int:
        return self.length

    def items(self, indices: Indices) -> list[tuple[int, Any]]:
        found: dict[int, Any] = {}
        with global_generators() as seed:
            for place in sorted({*indices.tolist()}):
                found[place] = self._at(place, seed)
        return [(place, found[place]) for place in indices.tolist()]

    def _at(self, place: int, seed: Callable[..., None]) -> Any:
        """The last one is kept, for the padding of a batch asks for it again."""
        if not self._begun or place < self._done - 1:
            seed(*self.key, 0)
            self._items = asked(self.name, "its iterator", lambda: iter(self.make()))
            self._begun, self._done = True, 0
        while self._done <= place:
            seed(*self.key, 1, self._done)
            item = asked(self.name, f"item {self._done}", self._next)
            if item is _END:
                self._ended(place)
            self._last = item
            self._done += 1
        return self._last

    def _next(self) -> Any:
        return next(self._items, _END)

    def _ended(self, place: int) -> None:
        n, self._begun = self._done, False
        text = f"the stream ended after {n} items, and item {place} (from 0) is due"
        cure = f"let it begin again by itself, or train.steps be at most {n} // train.batch_size"
        raise BadItem(self.name, f"{text}; {cure}")


_END = object()
