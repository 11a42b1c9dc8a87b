"""Times single kernels and modules on one device: products by size, copies, the blocks of a model."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from itertools import product as product_of
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.device import describe, synchronize
from benchmarks.gpu.lab import PartContext
from benchmarks.gpu.request import planned, shape
from launcher.job.schema.models import LanguageModel
from launcher.models.build import build_model
from launcher.models.defaults import resolve
from launcher.objective.losses import cross_entropy
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.trace.tensor_specs import dtype_of

WARM_UP = 3
KINDS = {
    "embedding": "embed", "norm": "layers.0.attn_norm", "attention": "layers.0.attn",
    "feed-forward": "layers.0.mlp", "block": "layers.0", "head": "head", "loss": "",
}  # fmt: skip
"""Each kind of block, and its module in ``model=lm``; the loss has none."""
BACKENDS = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """The sizes of everything that is timed; those of ``TINY`` are for a CPU."""

    squares: tuple[int, ...]
    copied: int
    times: int


REAL = Size(squares=(256, 512, 1024, 2048, 4096, 8192, 16384), copied=256 << 20, times=20)
TINY = Size(squares=(16, 64), copied=1 << 20, times=3)


@dataclass(frozen=True)
class Product:
    """A matrix product: (m x k) times (k x n)."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class Copy:
    """A copy within a device reads as many bytes as it writes. ``what``: from where to where."""

    what: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Block:
    """A kind of module: seconds and operations of its forward, and of forward and backward together."""

    kind: str
    forward: float
    both: float
    flops: int


def seconds(act: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median of ``times`` calls, after a warm-up.

    On a device, events between the calls measure the time, so that the device never idles.
    """
    for _ in range(WARM_UP):
        act()
    if device.type == "cpu":
        return statistics.median(_on_cpu(act) for _ in range(times))
    marks = [torch.Event(device=device, enable_timing=True) for _ in range(times + 1)]
    synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def _on_cpu(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def product(device: torch.device, dtype: torch.dtype, shape: Sequence[int], times: int) -> Product:
    m, n, k = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(n, k, device=device).to(dtype)  # the layout of a linear layer's weight
    return Product(m, n, k, seconds(lambda: torch.mm(a, b.t()), device, times))


def copies(device: torch.device, size: Size) -> Iterator[Copy]:
    """Yield copies within the device, and to and from pinned or pageable memory; on a CPU all are alike."""
    near, other = (torch.zeros(size.copied, dtype=torch.uint8, device=device) for _ in range(2))
    yield Copy("within the device", size.copied, seconds(lambda: other.copy_(near), device, size.times))
    for pinned in (True, False):
        host = torch.zeros(size.copied, dtype=torch.uint8, pin_memory=pinned and device.type != "cpu")
        word = "pinned" if pinned else "pageable"
        to = seconds(lambda h=host: near.copy_(h, non_blocking=True), device, size.times)
        yield Copy(f"{word} host memory to the device", size.copied, to)
        back = seconds(lambda h=host: h.copy_(near, non_blocking=True), device, size.times)
        yield Copy(f"the device to {word} host memory", size.copied, back)


def blocks(
    settings: LanguageModel, shape: tuple[int, int], device: torch.device, dtype: torch.dtype, times: int
) -> Iterator[Block]:
    """Yield each kind of module, timed alone on one micro batch; weights and inputs get gradients."""
    with default_dtype(dtype), device:
        model = build_model(settings)
    tokens = torch.randint(0, settings.vocab_size, shape, device=device)
    arguments = _arguments(model, [name for name in KINDS.values() if name], tokens)
    logits = torch.randn(*shape, settings.vocab_size, device=device).to(dtype).requires_grad_()

    for kind, name in KINDS.items():
        if name:
            yield _block(kind, model.get_submodule(name), arguments[name], device, times)
        else:
            loss = partial(cross_entropy, target=tokens, reduction="sum")
            yield _block(kind, loss, (logits,), device, times)


def _arguments(model: nn.Module, names: Sequence[str], tokens: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return the arguments that the forward passes to each module; floating-point tensors get a gradient."""
    seen: dict[str, tuple[Any, ...]] = {}

    def keep(name: str, args: tuple[Any, ...]) -> None:
        own = [a.detach() if isinstance(a, Tensor) else a for a in args]
        seen[name] = tuple(
            a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in own
        )

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: keep(name, args))
        for name in names
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def _block(
    kind: str, module: Callable[..., Tensor], args: tuple[Any, ...], device: torch.device, times: int
) -> Block:
    weights = [*module.parameters()] if isinstance(module, nn.Module) else []
    wanted = [t for t in (*weights, *args) if isinstance(t, Tensor) and t.requires_grad]
    grad = torch.ones_like(module(*args))
    with FlopCounterMode(display=False) as counter:
        module(*args)
    return Block(
        kind,
        seconds(lambda: module(*args), device, times),
        seconds(lambda: torch.autograd.grad(module(*args), wanted, grad, allow_unused=True), device, times),
        counter.get_total_flops(),
    )


def attention(
    shape: tuple[int, int], heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype, times: int
) -> Iterator[dict[str, Any]]:
    """Yield causal attention of one micro batch by each of torch's kernels, with keys shared or repeated.

    ``heads``: the number of query heads, the number of key heads, and the size of a head. A kernel that
    refuses has its message in its row.
    """
    samples, positions = shape
    queries, keys, size = heads

    def drawn(n: int) -> Tensor:
        return torch.randn(samples, n, positions, size, device=device).to(dtype).requires_grad_()

    q, k, v = drawn(queries), drawn(keys), drawn(keys)
    grad = torch.ones_like(q)
    named: dict[str, Any] = {"torch's choice": None}
    named |= {str(b).rpartition(".")[2].lower(): b for b in BACKENDS}
    for (name, backend), shared in product_of(named.items(), (True, False)):
        row: dict[str, Any] = {"kernel": name, "keys": "shared" if shared else "written out"}
        call = partial(_attended, q, k, v, shared)
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend) if backend is not None else nullcontext():
                warnings.simplefilter("ignore")  # a kernel that refuses warns of each reason
                row["forward_ms"] = round(seconds(call, device, times) * 1e3, 3)
                both = seconds(lambda: torch.autograd.grad(call(), (q, k, v), grad), device, times)  # noqa: B023
                row["both_ms"] = round(both * 1e3, 3)
        except RuntimeError as error:
            row["refused"] = str(error).splitlines()[0][:120]
        yield row


def _attended(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> Tensor:
    if not shared:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


def kernels(context: PartContext) -> None:
    """Run this part of the lab; every group of results is reported as soon as it is known."""
    job, plan = planned(context)
    s = shape(job, plan)
    assert isinstance(job.model, LanguageModel)
    low, size = dtype_of(plan.dtypes.compute), TINY if context.dry else REAL
    peak = describe(context.device).peak(plan.dtypes.compute)
    settings, _ = resolve(job.model.model_copy(update={"vocab_size": s.vocabulary}))
    assert isinstance(settings, LanguageModel)
    context.wait_for_turn()

    # attention by each kernel, then products, copies and blocks of a micro batch
    device = torch.device(context.device) if context.device == "cpu" else torch.device(context.device, 0)
    torch.set_num_threads(1 if context.dry else context.cores)
    batch = (plan.sizes.micro_batch, s.time)
    heads = (s.heads, s.kv_heads, s.head)
    context.report(dtype=plan.dtypes.compute, peak=peak, batch=list(batch))
    context.report(attention=list(attention(batch, heads, device, low, size.times)))
    tokens = batch[0] * batch[1]
    shapes = [(n, n, n) for n in size.squares]
    shapes += [(tokens, s.dim, s.dim), (tokens, s.ffn, s.dim), (tokens, s.vocabulary, s.dim)]
    context.report(products=[asdict(product(device, low, each, size.times)) for each in shapes])
    context.report(copies=[asdict(copy) for copy in copies(device, size)])
    context.report(blocks=[asdict(block) for block in blocks(settings, batch, device, low, size.times)])
