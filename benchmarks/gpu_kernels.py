"""What one device can do, a kernel or a module at a time: products by size, copies, the blocks of a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from launcher.job.schema.components import LanguageModel
from launcher.models.build import build_model
from launcher.models.defaults import resolve
from launcher.objective.cross_entropy import cross_entropy
from launcher.parallel.trace.model_facts import default_dtype, dtype_of
from launcher.runtime.cluster.world import World

WARM_UP = 3


@dataclass(frozen=True)
class Size:
    """How large everything is: the tiny one is for a CPU."""

    squares: tuple[int, ...]
    copied: int
    times: int


REAL = Size(squares=(256, 512, 1024, 2048, 4096, 8192, 16384), copied=256 << 20, times=20)
TINY = Size(squares=(16, 64), copied=1 << 20, times=3)


@dataclass(frozen=True)
class Product:
    """(m x k) times (k x n)."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        """A second."""
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Copy:
    """``what`` says from where to where."""

    what: str
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second; a copy within a device reads as many as it writes, which counts once."""
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class Block:
    """A kind of module: seconds and operations of its forward, and of forward and backward together."""

    kind: str
    forward: float
    both: float
    flops: int

    @property
    def backward(self) -> float:
        return self.both - self.forward


@dataclass(frozen=True)
class Kernels:
    products: tuple[Product, ...]
    copies: tuple[Copy, ...]
    blocks: tuple[Block, ...]


def describe(world: World) -> tuple[str, int]:
    """The name of a rank's GPU, and its bytes."""
    device = torch.cuda.get_device_properties(world.device)
    return device.name, device.total_memory


def measure(world: World, model: LanguageModel, shape: tuple[int, int], dtype: str, size: Size) -> Kernels:
    """On one rank's device; ``shape``: samples and positions of a micro batch."""
    device, low = torch.device(world.device), dtype_of(dtype)
    settings, _ = resolve(model)
    assert isinstance(settings, LanguageModel)
    assert settings.ffn_dim is not None
    tokens = shape[0] * shape[1]
    shapes = [(n, n, n) for n in size.squares]
    shapes += [(tokens, settings.dim, settings.dim), (tokens, settings.ffn_dim, settings.dim)]
    shapes += [(tokens, settings.vocab_size, settings.dim)]
    return Kernels(
        tuple(product(device, low, s, size.times) for s in shapes),
        tuple(copies(device, size)),
        tuple(blocks(settings, shape, device, low, size.times)),
    )


def seconds(act: Callable[[], object], device: torch.device, times: int) -> float:
    """The median of so many calls, after some that warm up. On a GPU between events: it is never let idle."""
    for _ in range(WARM_UP):
        act()
    if device.type != "cuda":
        return statistics.median(_on_cpu(act) for _ in range(times))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def _on_cpu(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def product(device: torch.device, dtype: torch.dtype, shape: Sequence[int], times: int) -> Product:
    m, n, k = shape
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(n, k, device=device).to(dtype)  # as a linear layer has its weight
    return Product(m, n, k, seconds(lambda: torch.mm(a, b.t()), device, times))


def copies(device: torch.device, size: Size) -> Iterator[Copy]:
    """Within the device, and to and from host memory that is pinned or not; on a CPU all are the same."""
    near, other = (torch.zeros(size.copied, dtype=torch.uint8, device=device) for _ in range(2))
    yield Copy("within the device", size.copied, seconds(lambda: other.copy_(near), device, size.times))
    for pinned in (True, False):
        host = torch.zeros(size.copied, dtype=torch.uint8, pin_memory=pinned and device.type == "cuda")
        word = "pinned" if pinned else "pageable"
        to = seconds(lambda h=host: near.copy_(h, non_blocking=True), device, size.times)
        yield Copy(f"{word} host memory to the device", size.copied, to)
        back = seconds(lambda h=host: h.copy_(near, non_blocking=True), device, size.times)
        yield Copy(f"the device to {word} host memory", size.copied, back)


def blocks(
    settings: LanguageModel, shape: tuple[int, int], device: torch.device, dtype: torch.dtype, times: int
) -> Iterator[Block]:
    """Of one micro batch, each kind of module by itself; weights and inputs get their gradients."""
    with default_dtype(dtype), device:
        model = build_model(settings)
    first = model.get_submodule("layers.0")
    tokens = torch.randint(0, settings.vocab_size, shape, device=device)
    hidden = torch.randn(*shape, settings.dim, device=device).to(dtype).requires_grad_()
    logits = torch.randn(*shape, settings.vocab_size, device=device).to(dtype).requires_grad_()

    def modules() -> Iterator[tuple[str, Callable[..., Tensor], Tensor]]:
        yield "embedding", model.get_submodule("embed"), tokens
        yield "norm", first.get_submodule("attn_norm"), hidden
        yield "attention", first.get_submodule("attn"), hidden
        yield "feed-forward", first.get_submodule("mlp"), hidden
        yield "block", first, hidden
        yield "head", model.get_submodule("head"), hidden
        yield "loss", lambda x: cross_entropy(x, tokens, reduction="sum"), logits

    for kind, module, x in modules():
        yield _block(kind, module, x, device, times)


def _block(kind: str, module: Callable[..., Tensor], x: Tensor, device: torch.device, times: int) -> Block:
    weights = [*module.parameters()] if isinstance(module, nn.Module) else []
    wanted = [t for t in (*weights, x) if t.requires_grad]
    grad = torch.ones_like(module(x))
    with FlopCounterMode(display=False) as counter:
        module(x)
    return Block(
        kind,
        seconds(lambda: module(x), device, times),
        seconds(lambda: torch.autograd.grad(module(x), wanted, grad), device, times),
        counter.get_total_flops(),
    )
