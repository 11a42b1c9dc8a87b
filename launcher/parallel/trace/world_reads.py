"""Notices code of a model that asks for the processes that it runs in: how many, which, their groups."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch.distributed.distributed_c10d as c10d

VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE",
    "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
})  # fmt: skip
"""Of the environment: what launchers tell a process of its world."""

BETWEEN = (
    "os", "_collections_abc", "collections.abc", "contextlib", "functools", __name__,
    "launcher.planner.trace_model",
)  # fmt: skip
"""Modules that are only on the way from who asks."""
DISTRIBUTED = "torch.distributed"
OTHERS = ("torch", "launcher", "transformers", "accelerate", "peft")
"""Who may ask: they do so for layouts of their own, which are not in use here."""


_TOLD: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def world_reads(told: Callable[[str], None]) -> Iterator[None]:
    """``told`` is called with what code of a model asks for meanwhile: ``torch.distributed.get_rank()``.

    Of the environment it is told by whoever calls ``ask`` when it is read.
    """
    world: Any = type(c10d._world)
    group = world.default_pg

    def asked(self: Any) -> Any:
        what = _asked()
        if what is not None:
            told(f"{what}()" if what else DISTRIBUTED)
        return group.fget(self)

    world.default_pg, token = property(asked, group.fset), _TOLD.set(told)
    try:
        yield
    finally:
        world.default_pg = group
        _TOLD.reset(token)


def ask(what: str) -> None:
    """Somebody has asked for ``what``: whoever listens is told if it was code of a model."""
    told = _TOLD.get()
    if told is not None and _asked() is not None:
        told(what)


def _asked() -> str | None:
    """The function of ``torch.distributed`` that the model called, "" for none; ``None``: none asked."""
    called = ""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == DISTRIBUTED or module.startswith(f"{DISTRIBUTED}."):
            name = frame.f_code.co_name
            if name == "<module>":  # it is being imported, and keeps no answer for the model
                return None
            called = called if name in ("wrapper", "WORLD") or name[0] == "_" else f"{DISTRIBUTED}.{name}"
        elif module not in BETWEEN:
            top = module.partition(".")[0]  # an import that torch does itself comes by importlib
            return None if top in OTHERS or top in sys.stdlib_module_names else called
        frame = frame.f_back
    return None


def streams_now() -> tuple[Any, ...]:
    """The state of the random streams that are not torch's."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), *rest
