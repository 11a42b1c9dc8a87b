"""Measures how long torch compiles each module: forwards in the first call, backwards in the first run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from launcher.plan.values.text import many

_log = logging.getLogger(__name__)


class CompileTimes:
    """Compile times of one model's modules by name, in seconds; ``graphs`` counts what was compiled for each.

    torch has one list of callbacks: of several models in one process, each counts what is compiled while its
    own modules run, and their backwards.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.graphs: dict[str, int] = {}
        self.called: set[str] = set()
        self._running: str | None = None
        self._owners: dict[str, str] = {}
        self._began = 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    @contextmanager
    def of(self, module: str) -> Iterator[None]:
        """Attribute compilations to ``module`` while it is called."""
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
        if compilation.callback_trigger is CallbackTrigger.DYNAMO:
            self.graphs[module] = self.graphs.get(module, 0) + 1
        _log.debug("compiled %s in %.2f s (%s)", module, seconds, compilation.callback_trigger.name.lower())

    def told(self) -> str:
        """Return a line about what has been compiled so far."""
        each = ", ".join(f"{module or 'the stage'} {n:.1f} s" for module, n in self.seconds.items())
        text = f"{many(sum(self.graphs.values()), 'graph')} in {sum(self.seconds.values()):.1f} s"
        alike = len(self.called - self.seconds.keys())
        shared = f"; {many(alike, 'module')} like these" if alike else ""
        return f"{text}{each and f': {each}'}{shared}"
