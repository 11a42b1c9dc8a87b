"""Ranks for tests on a device: one on each device, or several on the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from launcher.runtime.cluster.world import World
from launcher.runtime.processes.start_and_restart import run_ranks

T = TypeVar("T")


def missing_gpu() -> str:
    """Why torch finds no GPU to test on; empty if it finds one.

    GPUs are counted without initialization, because ranks are forked from this process.
    """
    if torch.cuda.device_count():
        return ""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f"no GPU for torch {torch.__version__} here: {error}"
    return f"torch {torch.__version__} counts no GPU here"


MISSING = missing_gpu()
ONLY_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)])
DEVICES = ["cpu", ONLY_GPU]
"""The devices of a test: the CPU everywhere, so that the test itself is tested, and a GPU where one exists."""


def ranks(device: str, size: int, work: Callable[..., T], *args: Any, **options: Any) -> list[T]:
    """``work(world, *args)`` on ``size`` ranks of this machine's ``device``; results in rank order.

    Several ranks share the first GPU, which NCCL refuses, so they use gloo. ``work`` and ``args`` are pickled.
    """
    call = partial(_on_one, work=work, args=args, device=device)
    if device == "cuda" and size == 1:
        return run_ranks(call, 1, device="cuda", **options)
    return run_ranks(call, size, device="cpu", backend="gloo", **options)


def _on_one(world: World, work: Callable[..., T], args: tuple[Any, ...], device: str) -> T:
    if device == "cuda" and world.device == "cpu":
        torch.cuda.set_device(0)
        torch.cuda.init()
        world = replace(world, device="cuda:0")
    with _through_host_memory():
        return work(world, *args)


@dataclass(frozen=True)
class Transfer:
    """One message between two stages through ``host`` memory; a received message is copied to ``to``."""

    work: dist.Work
    host: torch.Tensor
    to: torch.Tensor | None

    def wait(self) -> bool:
        done = self.work.wait()
        if self.to is not None:
            self.to.copy_(self.host)
        return bool(done)


@contextmanager
def _through_host_memory() -> Iterator[None]:
    """gloo reduces, gathers and broadcasts GPU tensors, but sends and receives host memory only."""
    before = dist.batch_isend_irecv
    dist.batch_isend_irecv = _exchange  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = before


def _exchange(messages: list[dist.P2POp]) -> list[Transfer]:
    out = []
    for m in messages:
        receives = m.op is dist.irecv
        host = torch.empty_like(m.tensor, device="cpu") if receives else m.tensor.cpu()
        work = m.op(host, m.peer, m.group, m.tag)
        out.append(Transfer(work, host, m.tensor if receives else None))
    return out
