"""Detects that a model reads environment variables of its rank, such as ``RANK`` and ``WORLD_SIZE``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def environment_reads() -> Iterator[None]:
    """Reports each read of a variable in ``VARIABLES`` to the observers of the forward, while entered."""
    from launcher.parallel.trace.rank_reads import VARIABLES, ask

    kind: Any = type(os.environ)
    get, has = kind.__getitem__, kind.__contains__

    def reporting(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def looked(self: Any, key: str) -> Any:
            if key in VARIABLES:
                ask(f"the environment variable {key}")
            return read(self, key)

        return looked

    kind.__getitem__, kind.__contains__ = reporting(get), reporting(has)
    try:
        yield
    finally:
        kind.__getitem__, kind.__contains__ = get, has
