"""The first step of a compiled model: allows more time for it, and reports how long it took."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

from launcher.plan.values.compilation import Compilation
from launcher.runtime.cluster.world import bounded, set_timeouts, usual_timeout
from launcher.runtime.torch_private.selftest import COMPILING, verify
from launcher.runtime.training.compile_cache import keep_compiled

if TYPE_CHECKING:
    from launcher.parallel.compile_times import CompileTimes

_log = logging.getLogger(__name__)


class CompileTimeout:
    """Sets the timeout of collectives: the plan's in the first step, which compiles; then the usual one."""

    def __init__(self, plan: Compilation | None) -> None:
        self.plan = plan
        self.usual = usual_timeout()
        self.done = plan is None
        if plan is not None:
            verify(COMPILING)
            keep_compiled()

    @property
    def timeout(self) -> timedelta:
        """The timeout while compiling; never less than the usual one."""
        return self.usual if self.plan is None else max(self.usual, timedelta(seconds=self.plan.timeout_s))

    @contextmanager
    def groups(self) -> Iterator[None]:
        """Gives process groups that are created in the block ``timeout``.

        gloo limits messages between two ranks to the timeout with which their group was created.
        """
        with bounded(self.timeout) if self.plan is not None else nullcontext():
            yield

    @contextmanager
    def around(self, times: CompileTimes | None) -> Iterator[None]:
        """Wraps every step; only the first one gets the longer timeout."""
        if self.done:
            yield
            return
        set_timeouts(self.timeout)
        yield
        set_timeouts(self.usual)
        self.done = True
        if times is not None:
            _log.info("train.compile: %s", times.summary())
