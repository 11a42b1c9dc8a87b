"""Samples of a torch ``Dataset``, by index."""

from __future__ import annotations

from functools import partial
from typing import Any

from launcher.data.shuffle import Indices
from launcher.data.torch_datasets.items import Items, asked
from launcher.data.torch_datasets.random_state import global_generators


class MapStyle(Items):
    """The items ``part`` of ``dataset``; index ``i`` is sample ``i % len`` as it is in epoch ``i // len``.

    What an item draws from the global generators depends only on ``key``, the epoch and the item, not on the
    process or the order of reading.
    """

    def __init__(self, dataset: Any, part: Indices, name: str, key: tuple[int, ...]) -> None:
        super().__init__(name)
        self.dataset, self.part, self.key = dataset, part, key

    def __len__(self) -> int:
        return len(self.part)

    def items(self, indices: Indices) -> list[tuple[int, Any]]:
        out = []
        with global_generators() as seed:
            for i in indices.tolist():
                epoch, at = divmod(i, len(self.part))
                number = int(self.part[at])
                seed(*self.key, epoch, number)
                item = asked(self.name, f"item {number}", partial(self.dataset.__getitem__, number))
                out.append((number, item))
        return out
