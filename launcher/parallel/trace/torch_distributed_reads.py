"""Detects code of a model that queries its rank, the number of ranks, or their process groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed.distributed_c10d as c10d

from launcher.parallel.model_state.python_state import INSTALLED

BETWEEN = (
    "os", "_collections_abc", "collections.abc", "contextlib", "functools", __name__,
    "launcher.planner.rank_variable_reads",
)  # fmt: skip
"""Modules that are skipped in the search for the caller."""
DISTRIBUTED = "torch.distributed"
OTHERS = ("torch", "launcher", "transformers", "accelerate", "peft")
"""Packages that may query the processes: they do so for layouts of their own, which are not in use here."""


_REPORT: ContextVar[Callable[[str], None] | None] = ContextVar("report", default=None)


@contextmanager
def world_reads(report: Callable[[str], None]) -> Iterator[None]:
    """Calls ``report`` with each query that a model's code makes in the block.

    A query is a text such as ``torch.distributed.get_rank()``. Reads of the environment are reported by the
    callers of ``ask``.
    """
    world: Any = type(c10d._world)
    group = world.default_pg

    def default_group(self: Any) -> Any:
        function = _called_function()
        if function is not None:
            report(f"{function}()" if function else DISTRIBUTED)
        return group.fget(self)

    world.default_pg, token = property(default_group, group.fset), _REPORT.set(report)
    try:
        yield
    finally:
        world.default_pg = group
        _REPORT.reset(token)


def ask(query: str) -> None:
    """Reports ``query`` to the active ``world_reads``, if it came from a model's code."""
    report = _REPORT.get()
    if report is not None and _called_function() is not None:
        report(query)


def _called_function() -> str | None:
    """Returns the function of ``torch.distributed`` that the model called, or "" for none.

    ``None``: the query does not come from a model's code.
    """
    called = ""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == DISTRIBUTED or module.startswith(f"{DISTRIBUTED}."):
            name = frame.f_code.co_name
            if name == "<module>":  # the query is part of an import, and the model does not get its result
                return None
            called = called if name in ("wrapper", "WORLD") or name[0] == "_" else f"{DISTRIBUTED}.{name}"
        elif module not in BETWEEN:
            top = module.partition(".")[0]  # torch's own imports come by importlib
            other = top in OTHERS or top in sys.stdlib_module_names or _is_imported(frame)
            return None if other else called
        frame = frame.f_back
    return None


def _is_imported(frame: Any) -> bool:
    """Returns true if ``frame`` runs during the import of a package: the model does not get the result."""
    while frame is not None and frame.f_code.co_filename.startswith(INSTALLED):
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False
