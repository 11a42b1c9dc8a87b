"""Samples of a torch ``IterableDataset``, in its own order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.data.shuffle import Indices
from launcher.data.torch_datasets.items import BadItem, Items, asked
from launcher.data.torch_datasets.random_state import global_generators

ENDLESS = 1 << 62
"""The length of a stream without ``__len__``."""
LONGEST = 1 << 20
"""The maximum number of characters of a state, which is saved in checkpoints' metadata."""
METHODS = ("state_dict", "load_state_dict")


class Stream(Items):
    """Index ``i`` is the ``i``-th item of an iterator over ``make()``; each rank reads all items up to it.

    Going back builds the data set again and reads it from the start. What an item draws from the global
    generators depends on ``key`` and its index. ``request``: text that identifies what its items depend on.
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
        found: dict[int, Any] = {}
        with global_generators() as seed:
            for place in sorted({*indices.tolist()}):
                found[place] = self._at(place, seed)
        return [(place, found[place]) for place in indices.tolist()]

    def _at(self, place: int, seed: Callable[..., None]) -> Any:
        """Returns an item. Keeps the last one, because the padding of a batch repeats it."""
        if not self._begun or place < self._done - (self._last is not _END):
            self._begin(seed)
        while self._done <= place:
            seed(*self.key, 1, self._done)
            item = asked(self.name, f"item {self._done}", self._next)
            if item is _END:
                self._ended(place)
            self._last = item
            self._done += 1
        return self._last

    def _begin(self, seed: Callable[..., None], state: Any = None) -> None:
        """Begins at the first item, or where ``state`` continues."""
        seed(*self.key, 0)
        self._made = self.make()
        if state is not None and _stateful(self._made):
            asked(self.name, "its load_state_dict", lambda: self._made.load_state_dict(state))
        self._items = items = asked(self.name, "its iterator", lambda: iter(self._made))
        if state is not None and not _stateful(self._made):
            asked(self.name, "its load_state_dict", lambda: items.load_state_dict(state))
        self._begun, self._done, self._last = True, 0, _END

    def anew(self) -> Stream:
        return Stream(self.make, self.name, self.key, self.length, self.request)

    def place(self) -> dict[str, Any] | None:
        """The position for ``go_on``, in JSON; ``None`` if neither the data set nor its iterator has one.

        It comes from ``state_dict`` and ``load_state_dict``, as torchdata defines them.
        """
        known: tuple[Any, ...] = (self._made, self._items)
        one = next((one for one in known if _stateful(one)), None)
        if one is None or not self._begun:
            return None
        state = asked(self.name, "its state_dict", one.state_dict)
        try:
            text = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return None
        if len(text) > LONGEST:
            return None
        return {"request": self.request, "items": self._done, "state": json.loads(text)}

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Continues at ``place``, if it is of the same request; otherwise reads from the start."""
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
        text = f"the stream ended after {n} items, and item {place} (from 0) is due"
        cure = f"let it start over by itself, or set train.steps to at most {n} // train.batch_size"
        raise BadItem(self.name, f"{text}; {cure}")


def _stateful(one: Any) -> bool:
    return all(callable(getattr(one, name, None)) for name in METHODS)


_END = object()
