"""Times matrix products, attention and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from launcher.extras.calibration.constants import (
    Moved,
    Round,
    Taken,
    Timed,
    TimedAttention,
    TimedBlock,
    TimedProduct,
)
from launcher.parallel.cost.kernels import OperationsMeter
from launcher.parallel.dispatch.modes import Dispatch
from launcher.plan.values.operations import Operations, Product
from launcher.runtime.device import synchronize, total_memory

LEAST_SECONDS = 0.01
"""The least seconds of a timing, far more than the errors of clocks and wake-ups."""
MOST_TIMES = 2000
ROOMY = 16 << 30
"""Device bytes from which on samples have their full sizes: together they use at most half of it."""


def divisor(memory: int) -> int:
    """Returns the divisor of the sides of samples on a device with ``memory`` bytes: a power of two.

    >>> [divisor(gb << 30) for gb in (80, 16, 15, 4, 3)]
    [1, 1, 2, 2, 4]
    """
    halvings = 0
    while memory << 2 * halvings < ROOMY:
        halvings += 1
    return 1 << halvings


@dataclass(frozen=True)
class TimedWork:
    """Runs ``work`` ``times`` times on the ranks that are ``in_it``; ``joint``: they wait for each other.

    ``before`` runs untimed ahead of each repetition. ``share``: the share of the seconds that counts, if the
    work does more than ``timed`` names.
    """

    timed: Timed
    work: Callable[[], object]
    in_it: bool = True
    joint: bool = False
    before: Callable[[], object] | None = None
    share: float = 1.0
    least: float = LEAST_SECONDS
    times: int = 1


def prepared(sample: TimedWork, device: torch.device) -> TimedWork:
    """Warms up, and sets ``times`` so that the timing takes ``least`` seconds; all ranks call it."""
    _timed(sample, device)
    dist.barrier()
    began = time.perf_counter()
    counted, _ = _timed(sample, device)
    elapsed = time.perf_counter() - began if sample.before is not None else counted
    took = torch.tensor(elapsed, dtype=torch.float64).nan_to_num(0.0)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return replace(sample, times=min(MOST_TIMES, max(1, math.ceil(sample.least / max(took.item(), 1e-9)))))


def _timed(sample: TimedWork, device: torch.device) -> tuple[float, float]:
    """Returns the seconds of all repetitions, and this thread's CPU seconds in them.

    Both are NaN on ranks that are not in it.
    """
    if not sample.in_it:
        return math.nan, math.nan
    if sample.before is not None:
        each = [_after(sample.before, sample.work, device) for _ in range(sample.times)]
        return sum(each), 0.0
    if not sample.joint:  # ranks without work may still be leaving the barrier
        sample.work()
    return _clocked(lambda: [sample.work() for _ in range(sample.times)], device)


def _after(before: Callable[[], object], work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of ``work``, without ``before``."""
    before()
    return _clocked(work, device)[0]


def _clocked(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    synchronize(device)
    began, ran = time.perf_counter(), time.thread_time()
    work()
    synchronize(device)
    return time.perf_counter() - began, time.thread_time() - ran


def one_round(samples: list[TimedWork], device: torch.device) -> Round:
    """Times each sample once on every rank; returns the seconds that it adds to a step.

    That is the time of the slowest rank, for which the others wait. For a sample with ``before`` it is the
    time of the rank that arrives last, which is the fastest: it waits for no other.
    """
    rows = []
    for sample in samples:
        dist.barrier()
        rows.append(_timed(sample, device))
    each = zip(samples, rows, strict=True)
    local_seconds = torch.tensor([t / s.times * s.share for s, (t, _) in each], dtype=torch.float64)
    most, least = local_seconds.nan_to_num(-math.inf), local_seconds.nan_to_num(math.inf)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    after = torch.tensor([s.before is not None for s in samples])
    seconds = torch.where(after, least, most).tolist()

    # in work that is not joint no rank waits: time without a core went to other processes
    alone = [row for s, row in zip(samples, rows, strict=True) if not s.joint]
    own = torch.tensor(alone, dtype=torch.float64).nansum(0)
    dist.all_reduce(own)
    taken = 1 - (own[1] / own[0]).item() if device.type == "cpu" else 0.0
    return {**dict(zip((s.timed for s in samples), seconds, strict=True)), Taken(): taken}


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "fp16": torch.float16}


@dataclass(frozen=True)
class WorkSizes:
    """Sizes of the timed work: ``rows`` of samples, model ``width``; ``main``: the usual precision."""

    main: str
    rows: int
    width: int
    copied: int


CPU = WorkSizes("fp32", rows=1024, width=256, copied=1 << 24)
GPU = WorkSizes("bf16", rows=8192, width=4096, copied=1 << 28)
HEADS, TINY = 4, 32
PRODUCTS = 9
"""Matrix products of a block, forward and backward."""
STEADY = 0.03
"""Seconds of products of one size, which are compared with other sizes."""
LONG = 0.05
"""Seconds of work on one core, which is timed alone and while other ranks work."""


def sizes_on(device: torch.device) -> WorkSizes:
    """Returns the sizes for the CPU, or those that fit in the memory of the device."""
    if device.type == "cpu":
        return CPU
    by = divisor(total_memory(device))
    return replace(GPU, rows=GPU.rows // by, width=GPU.width // by, copied=GPU.copied // by**2)


def timed_kernels(device: torch.device, in_it: bool, first: bool) -> Iterator[TimedWork]:
    """Yields the timed kernels. ``in_it``: this rank has its own core; ``first``: it is also timed alone."""
    sizes = sizes_on(device)
    rows, width = sizes.rows, sizes.width
    for m, n, k in (
        (rows, width, width), (rows, 11 * width // 4, width), (rows // 8, width, width),
        (2 * rows, 4 * width, width), (rows, rows, rows), (rows // 4, width // 4, width),
    ):  # fmt: skip
        yield _product(sizes.main, m, n, k, device=device, in_it=in_it)
    for precision in DTYPES:
        if precision != sizes.main:
            yield _product(precision, rows, width, width, device=device, in_it=in_it)
    yield _attention(sizes, device, in_it)
    copied = torch.ones(sizes.copied // 4, device=device)
    into = torch.empty_like(copied)
    yield TimedWork(
        Moved("copy", Operations(moved=2 * copied.nbytes, kernels=1)), lambda: into.copy_(copied), in_it
    )
    others, tiny = _others(rows, width), _tiny()
    yield TimedWork(Moved("others", _counted(others)), others(device), in_it)
    yield TimedWork(Moved("tiny", _counted(tiny)), tiny(device), in_it)
    if device.type == "cpu":
        block = _block(rows, width, others(device))
        yield TimedWork(TimedBlock(alone=False), block, in_it, least=LONG)
        yield TimedWork(TimedBlock(alone=True), block, first, least=LONG)


def _product(precision: str, m: int, n: int, k: int, *, device: torch.device, in_it: bool) -> TimedWork:
    """Returns the products of a linear layer: its forward, and the gradients of both factors."""
    dtype = DTYPES[precision]
    x, weight, grad = (torch.randn(s, device=device).to(dtype) for s in ((m, k), (n, k), (m, n)))

    def work() -> None:
        x @ weight.t()
        grad @ weight
        grad.t() @ x

    operation = TimedProduct(precision, Product(m, n, k, 1, dtype.itemsize))
    return TimedWork(operation, work, in_it, share=1 / 3, least=STEADY)


def _block(rows: int, width: int, others: Callable[[], object]) -> Callable[[], object]:
    """Returns the products of a block, then its ``others``."""
    x, weight = torch.randn(rows, width), torch.randn(11 * width // 4, width)

    def work() -> None:
        for _ in range(PRODUCTS):
            x @ weight.t()
        others()

    return work


def _attention(sizes: WorkSizes, device: torch.device, in_it: bool) -> TimedWork:
    batch, length, head = 8, sizes.rows // 8, sizes.width // HEADS
    made = torch.randn(3, batch, HEADS, length, head, device=device).to(DTYPES[sizes.main])
    q, k, v = (t.requires_grad_() for t in made.unbind())

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out.detach())

    return TimedWork(TimedAttention(sizes.main, 2 * batch * HEADS * length * length * head), work, in_it)


Made = Callable[[torch.device], Callable[[], object]]
"""Makes work on tensors of a device."""


def _others(rows: int, width: int) -> Made:
    """Returns the work of a block besides products and attention, forward and backward."""

    def made(device: torch.device) -> Callable[[], object]:
        norms = nn.ModuleList(nn.RMSNorm(width, device=device) for _ in range(2))
        x, q, k = (torch.randn(1, rows, width, device=device, requires_grad=True) for _ in range(3))
        gate, up = (
            torch.randn(1, rows, 11 * width // 4, device=device, requires_grad=True) for _ in range(2)
        )
        angle = torch.zeros(rows, width // HEADS // 2, device=device)
        leaves = [x, q, k, gate, up, *norms.parameters()]

        def work() -> None:
            heads = (t.view(1, rows, HEADS, -1).transpose(1, 2) for t in (q, k))
            turned = [_rotated(t, angle).transpose(1, 2).flatten(2) for t in heads]
            out = norms[1](x + norms[0](x) + turned[0] + turned[1])
            inner = F.silu(gate) * up
            torch.autograd.grad([out, inner], leaves, [out.detach(), inner.detach()])

        return work

    return made


def _rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of values, as rotary embeddings do."""
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _tiny() -> Made:
    """Returns blocks of a few values, forward and backward: their time is launch time."""

    def made(device: torch.device) -> Callable[[], object]:
        norm = nn.RMSNorm(TINY, device=device)
        first, second = (nn.Linear(TINY, TINY, bias=False, device=device) for _ in range(2))
        x = torch.randn(1, 8, TINY, device=device, requires_grad=True)
        leaves = [x, *(p for m in (norm, first, second) for p in m.parameters())]

        def work() -> None:
            out = x
            for _ in range(4):
                heads = first(norm(out)).view(1, 8, 2, -1).transpose(1, 2)
                out = out + second(F.silu(heads.transpose(1, 2).flatten(2)) * out)
            torch.autograd.grad(out, leaves, out.detach())

        return work

    return made


def _counted(made: Made) -> Operations:
    """Returns the operations, counted as the planner does."""
    work = made(torch.device("meta"))
    with _Counting() as seen:
        work()
    counted: Operations = seen.meter.since(0)
    return counted


class _Counting(Dispatch):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = OperationsMeter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.meter.see(func, args, kwargs or {}, out)
        return out
