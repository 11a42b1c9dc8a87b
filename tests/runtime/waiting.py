"""A run that ends only on request: it prints a line with the process id of each rank."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from launcher.runtime.cluster.world import World
from launcher.runtime.faults import Interrupted
from launcher.runtime.processes.fork_server import only_imported, start_here
from launcher.runtime.processes.start_and_restart import run_ranks


def work(world: World) -> None:
    """Rank 0 waits in a collective for rank 1, which waits for a signal."""
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.all_reduce(torch.ones(1))
    os.write(1, f"{os.getpid()}\n".encode())  # print may write the end of the line separately
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        signal.pause() if "deaf" not in sys.argv else forever()


def forever() -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    only_imported()
    try:
        run_ranks(work, 2, max_restarts=3, start=None if "served" in sys.argv else start_here)
    except Interrupted as stop:
        print(stop)
        sys.exit(128 + stop.signum)
