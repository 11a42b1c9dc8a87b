"""The calls that ``transform.py`` times, each in its own process, which imports first and waits for a sign.

The first argument names the call. The second is a folder for signs, which are files: the process creates
``ready``, waits for ``go``, and writes ``seconds``. This module imports nothing that another program's
environment lacks.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def timed(signs: Path, call: Callable[[], object]) -> None:
    (signs / "ready").touch()
    while not (signs / "go").exists():
        time.sleep(0.001)
    began = time.perf_counter()
    call()
    (signs / "seconds").write_text(str(time.perf_counter() - began))


def ours(signs: Path, src: str, dst: str, target: str, workers: str) -> None:
    from launcher.checkpoint import transform
    from launcher.checkpoint.layout import strategy_file

    to = strategy_file.load(Path(target))
    timed(signs, lambda: transform(Path(src), Path(dst), to, workers=int(workers)))


def rank_files(signs: Path, src: str, dst: str, workers: str) -> None:
    from launcher.checkpoint import transform_checkpoints

    timed(signs, lambda: _mindspore_named(transform_checkpoints, src, dst, int(workers)))


def mindspore(signs: Path, src: str, dst: str, workers: str) -> None:
    import mindspore

    timed(signs, lambda: _mindspore_named(mindspore.transform_checkpoints, src, dst, int(workers)))


def _mindspore_named(call: Callable[..., object], src: str, dst: str, workers: int) -> None:
    call(src, dst, "net", f"{src}.ckpt", f"{dst}.ckpt", process_num=workers, output_format="safetensors")


def copy(signs: Path, src: str, dst: str, sync: str) -> None:
    def call() -> None:
        subprocess.run(["cp", "-r", src, dst], check=True)
        if sync:
            subprocess.run(["sync", *(str(path) for path in Path(dst).rglob("*"))], check=True)

    timed(signs, call)


def dcp(signs: Path, src: str, dst: str, mib: str, case: str) -> None:
    """Ranks of the destination load their shards of ``src`` and save them; their start is not timed."""
    from benchmarks.checkpoints import CASES
    from launcher.runtime.processes.fork_server import serving_from_here
    from launcher.runtime.processes.start_and_restart import run_ranks

    _import_dcp()
    with serving_from_here():
        run_ranks(
            partial(_reshard, signs=signs, src=src, dst=dst, mib=int(mib), grid=CASES[case].dst),
            CASES[case].dst.size,
        )


def dcp_source(folder: str, mib: int, case: str) -> None:
    """Write the checkpoint that ``dcp`` reads, on as many ranks as the source has."""
    from benchmarks.checkpoints import CASES
    from launcher.runtime.processes.start_and_restart import run_ranks

    _import_dcp()
    run_ranks(partial(_save, folder=folder, mib=mib, grid=CASES[case].src), CASES[case].src.size)


def _import_dcp() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401


def _save(world: Any, folder: str, mib: int, grid: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_shards(world.rank, mib, grid), checkpoint_id=folder)


def _reshard(world: Any, signs: Path, src: str, dst: str, mib: int, grid: Any) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    state = _shards(world.rank, mib, grid)
    for shard in state.values():
        shard.to_local().zero_()

    def call() -> None:
        dcp.load(state, checkpoint_id=src)
        dcp.save(state, checkpoint_id=dst)
        dist.barrier()

    dist.barrier()
    if world.rank == 0:
        timed(signs, call)
    else:
        call()  # its first collective waits for rank 0
    wanted = _shards(world.rank, mib, grid)
    wrong = [n for n, shard in state.items() if not shard.to_local().equal(wanted[n].to_local())]
    if wrong:
        raise RuntimeError(f"not what was saved: {', '.join(wrong)}")


def _shards(rank: int, mib: int, grid: Any) -> dict[str, Any]:
    """Return this rank's stage of the model as DTensors, with the expected values in the strategy's boxes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from benchmarks.checkpoints import strategy, values
    from launcher.plan.values.grid import Grid

    axes = ("pp", "dp_replicate", "tp", "dp_shard")  # where both cut dim 0, tp is the outer one
    of = strategy(Grid(tuple((axis, grid[axis]) for axis in axes)), mib)
    mesh = init_device_mesh("cpu", tuple(grid[axis] for axis in axes), mesh_dim_names=axes)[axes[1:]]
    out = {}
    for name, entry in of.entries_of(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        where = {axis: Shard(dim) for dim, cut in enumerate(entry.layout.split) for axis in cut}
        places = [where.get(axis, Replicate()) for axis in axes[1:]]
        out[name] = DTensor.from_local(torch.from_numpy(values(name, box)), mesh, places, run_check=False)
    return out


CALLS: dict[str, Callable[..., None]] = {
    "ours": ours,
    "rank_files": rank_files,
    "mindspore": mindspore,
    "dcp": dcp,
    "copy": copy,
}

if __name__ == "__main__":
    CALLS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
