"""Detects that code of the user's asks for its rank, or for variables such as ``RANK`` and ``WORLD_SIZE``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from launcher.errors import Problem, refuse

VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE",
    "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
})  # fmt: skip
"""Environment variables by which launchers describe the world to a process."""


@contextmanager
def same_on_all_ranks(key: str, name: str, ranks: int) -> Iterator[None]:
    """Refuses the class at ``name`` if it asks for its rank in the block, and there are several ``ranks``.

    A model is refused in the same way, with the module that asks.
    """
    from launcher.parallel.trace.torch_distributed_reads import world_reads

    queries: dict[str, None] = {}
    with environment_reads(), world_reads(queries.setdefault):
        yield
    text = f"but {ranks} ranks get another answer than one process, so another layout gives other numbers"
    cure = "remove it: the launcher combines samples, gradients, losses and metrics itself"
    refuse([Problem(key, f"{name}: it asks for {query}, {text}; {cure}") for query in queries if ranks > 1])


@contextmanager
def environment_reads() -> Iterator[None]:
    """Reports each read of a variable in ``VARIABLES`` to the observers of the forward, while entered."""
    from launcher.parallel.trace.torch_distributed_reads import ask

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
