"""Measures how long torch.compile takes for each module."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launcher.plan.values.text import many

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

_log = logging.getLogger(__name__)


class CompileTimes:
    """The compile time of each module of a model, in seconds; ``graphs`` has its number of graphs.

    torch has one list of callbacks per process. If a process has several models, each counts only the
    compilations of its own modules, their backwards included.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.graphs: dict[str, int] = {}
        self.called: set[str] = set()
        self._running: str | None = None
        self._owners: dict[str, str] = {}
        self._began = 0.0
        from torch._dynamo.callback import callback_handler  # takes half a second

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    @contextmanager
    def of(self, module: str) -> Iterator[None]:
        """Attributes compilations to ``module`` while it is called."""
        self.called.add(module)
        around, self._running = self._running, module
        try:
            yield
        finally:
            self._running = around

    def _start(self, compilation: CallbackArgs) -> None:
        if self._running is not None:
            self._owners[compilation.compile_id] = self._running
        self._began = time.perf_counter()

    def _end(self, compilation: CallbackArgs) -> None:
        module = self._owners.get(compilation.compile_id)
        if module is None:
            return
        seconds = time.perf_counter() - self._began
        self.seconds[module] = self.seconds.get(module, 0.0) + seconds
        if compilation.callback_trigger.name == "DYNAMO":
            self.graphs[module] = self.graphs.get(module, 0) + 1
        _log.debug("compiled %s in %.2f s (%s)", module, seconds, compilation.callback_trigger.name.lower())

    def summary(self) -> str:
        """Returns a line on all compilations so far."""
        each = ", ".join(f"{module or 'the stage'} {n:.1f} s" for module, n in self.seconds.items())
        text = f"{many(sum(self.graphs.values()), 'graph')} in {sum(self.seconds.values()):.1f} s"
        alike = len(self.called - self.seconds.keys())
        shared = f"; shared by {many(alike, 'more module')}" if alike else ""
        return f"{text}{each and f': {each}'}{shared}"
