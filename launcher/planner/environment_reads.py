"""Detects that a model reads environment variables of its rank, such as ``RANK`` and ``WORLD_SIZE``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def environment_reads() -> Iterator[None]:
    """Reports each read of a variable in ``VARIABLES`` to the observers of the forward, while entered."""
    from launcher.parallel.trace.process_group_reads import VARIABLES, ask

    kind: Any = type(os.environ)
    get, has = kind.__getitem__, kind.__contains__

    def reporting(read: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def looked(self: Any, key: Any) -> Any:
            name = os.fsdecode(key) if isinstance(key, bytes) else key  # bytes are keys of ``os.environb``
            if name in VARIABLES:
                ask(f"the environment variable {name}")
            return read(self, key)

        return looked

    kind.__getitem__, kind.__contains__ = reporting(get), reporting(has)
    try:
        yield
    finally:
        kind.__getitem__, kind.__contains__ = get, has
