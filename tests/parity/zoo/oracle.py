"""The oracle: plain torch, which imports nothing of the project.

Data parallelism is that of ``DistributedDataParallel``: a process for each replica, each on its own part of the
batch; gradients are summed, and the first replica's buffers are sent to the others; see ``_shared``.
"""

from __future__ import annotations

import multiprocessing as mp
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

Read = Callable[[list[int]], tuple[tuple[Tensor, ...], Tensor]]
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Terms:
    """The settings of one training. ``optim``: ``sgd`` with momentum, or ``adamw``."""

    replicas: int
    micros: int
    batch: int
    steps: int
    samples: int
    optim: str
    clip: float
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """``norm`` is before clipping, and ``grads`` are after it."""

    loss: float
    norm: float
    grads: Named
    buffers: Named


@dataclass(frozen=True)
class Trained:
    """``built``: the weights and buffers of a plain build from the seed in training mode, before anything is loaded."""

    steps: list[Step]
    weights: Named
    built: Named


class _Replicas:
    """Pipes between the first replica and each of the others, which have only the pipe to the first."""

    def __init__(self, ends: Sequence[Connection], first: bool) -> None:
        self.ends, self.first = ends, first

    def gathered(self, mine: Any) -> list[Any]:
        """The values of all replicas, in order. Raises if one of them has raised."""
        if not self.first:
            self.ends[0].send_bytes(pickle.dumps(mine))
            every: list[Any] = pickle.loads(self.ends[0].recv_bytes())
            return every
        every = [mine, *(pickle.loads(end.recv_bytes()) for end in self.ends)]
        for one in every:
            if isinstance(one, Exception):
                raise one
        for end in self.ends:
            end.send_bytes(pickle.dumps(every))
        return every


def train(build: Callable[[], nn.Module], start: Mapping[str, Tensor], read: Read, terms: Terms) -> Trained:
    """Train from ``start``, which may name any tensors, in fp64."""
    ends = []
    for place in range(1, terms.replicas):
        mine, theirs = mp.Pipe()
        other = (build, start, read, terms, place, theirs)
        mp.get_context("fork").Process(target=_other, args=other).start()
        theirs.close()
        ends.append(mine)
    return _replica(build, start, read, terms, 0, _Replicas(ends, first=True))


def _other(
    build: Callable[[], nn.Module], start: Mapping[str, Tensor], read: Read, terms: Terms, place: int, end: Connection
) -> None:
    try:
        _replica(build, start, read, terms, place, _Replicas([end], first=False))
    except EOFError:
        return  # the first has failed, and reports it
    except Exception as error:
        end.send_bytes(pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))


def _replica(
    build: Callable[[], nn.Module],
    start: Mapping[str, Tensor],
    read: Read,
    terms: Terms,
    place: int,
    replicas: _Replicas,
) -> Trained:
    torch.set_default_dtype(torch.float64)
    model, built = _built(build, start, terms.seed)
    model.train()  # as at the start of every loop; it may change weights
    built = built or _kept({**dict(model.named_parameters()), **dict(model.named_buffers())})
    _load(model, start)
    optimizer = _optimizer(model, terms.optim)
    order = _order(terms)
    steps = []
    for n in range(terms.steps):
        indices = order[n * terms.batch : (n + 1) * terms.batch]
        steps.append(_step(model, optimizer, *read(indices), terms, place, replicas))
    return Trained(steps, _kept(dict(model.named_parameters())), built)


class _Draws(TorchDispatchMode):
    """Records the results of random operations, and replaces them by ``known`` values, by the count of operations."""

    def __init__(self, known: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.drawn: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor):
            with torch.no_grad():
                known = self.known.get(len(self.drawn))
                if known is not None and known.shape == out.shape:
                    out.copy_(known)
                self.drawn.append((out.detach(), out.detach().clone()))
        return out


def _built(build: Callable[[], nn.Module], start: Mapping[str, Tensor], seed: int) -> tuple[nn.Module, Named]:
    """The model, whose constructor has drawn the values of ``start``, so that all it computes from them is right.

    Also the tensors of a plain constructor, to which ``start`` must be similar.
    """
    mine, theirs = mp.Pipe()
    mp.get_context("fork").Process(target=_drawn, args=(build, list(start), seed, theirs), daemon=True).start()
    theirs.close()
    try:
        places, plain = pickle.loads(mine.recv_bytes())
    except EOFError:
        places, plain = {}, {}  # the constructor fails here too, or its tensors cannot be sent
    torch.manual_seed(seed)
    with _Draws({place: start[name] for place, name in places.items()}):
        return build(), plain


def _drawn(build: Callable[[], nn.Module], names: Sequence[str], seed: int, end: Connection) -> None:
    """Send the draws of a constructor that remain unchanged in a tensor, with its name, and all tensors.

    This runs in a separate process, because a constructor may count its calls.
    """
    torch.manual_seed(seed)
    with _Draws({}) as draws:
        model = build()
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {(t.data_ptr(), t.shape): n for n, t in own.items() if n in names and t.numel() and not t.is_meta}
    places = {
        place: tensors[out.data_ptr(), out.shape]
        for place, (out, drawn) in enumerate(draws.drawn)
        if not out.is_meta and (out.data_ptr(), out.shape) in tensors and torch.equal(out, drawn)
    }
    model.train()  # as a loop does; it may change weights
    end.send_bytes(pickle.dumps((places, _kept({**dict(model.named_parameters()), **dict(model.named_buffers())}))))


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    xs: tuple[Tensor, ...],
    y: Tensor,
    terms: Terms,
    place: int,
    replicas: _Replicas,
) -> Step:
    counted = int((y != -100).sum())
    mine = [t.chunk(terms.replicas)[place] for t in (*xs, y)]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for *x, t in zip(*(part.chunk(terms.micros) for part in mine), strict=True):
        out = model(*x)
        loss = F.cross_entropy(out.flatten(0, -2), t.flatten(), ignore_index=-100, reduction="sum") / counted
        loss.backward()
        total += loss.item()
    _add_up(model, replicas)
    norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], terms.clip)
    optimizer.step()
    _load(model, _shared(model, replicas.gathered(_kept(dict(model.named_buffers())))))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(sum(replicas.gathered(total)), float(norm), _kept(grads), _kept(dict(model.named_buffers())))


def _shared(model: nn.Module, buffers: list[Named]) -> Named:
    """The buffers of the first replica; the statistics of an instance norm are those of one process, a mean."""
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.modules.instancenorm._InstanceNorm)}
    means = {n for n in buffers[0] if n.rpartition(".")[0] in norms and n.endswith(("running_mean", "running_var"))}
    return {n: torch.stack([own[n] for own in buffers]).mean(0) if n in means else t for n, t in buffers[0].items()}


@torch.no_grad()
def _add_up(model: nn.Module, replicas: _Replicas) -> None:
    """Give all replicas the sum of their gradients; those of a sparse embedding become dense."""
    params = list(model.parameters())
    grads = [p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad for p in params]
    for p, *same in zip(params, *replicas.gathered([None if g is None else g.detach() for g in grads]), strict=True):
        there = [g for g in same if g is not None]
        if there:
            p.grad = torch.stack(there).sum(0)


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Weight decay for tensors of two or more dims, and none for gains and biases: the rule in the README."""
    mine = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in mine if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in mine if p.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _order(terms: Terms) -> list[int]:
    """The documented order of samples in the first epoch: sorted by the raw output of Philox."""
    keys = np.random.Philox(np.random.SeedSequence(terms.seed, spawn_key=(0,))).random_raw(terms.samples)
    return [int(i) for i in np.argsort(keys, kind="stable")]


@torch.no_grad()
def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    mine = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, t in tensors.items():
        if name in mine and mine[name] is not t:
            mine[name].copy_(t)


def _kept(tensors: Mapping[str, Tensor]) -> Named:
    return {n: t.detach().clone() for n, t in tensors.items()}


def unlike(start: Mapping[str, Tensor], built: Mapping[str, Tensor]) -> list[str]:
    """Tensors whose initial numbers are not of the same kind as those of a plain build.

    Constants must be equal; for more than 16 random numbers, mean and deviation must agree to six standard errors.
    """
    out = []
    for name, a in start.items():
        b = built.get(name)
        if b is None or not b.numel() or not b.is_floating_point():
            continue
        spread, n = b.std(unbiased=False).item(), b.numel()
        if not bool(a.isfinite().all()) and bool(b.isfinite().all()):
            out.append(f"{name} is not finite")
        elif n > 1 and spread < 1e-12:
            if not torch.allclose(a, b):
                out.append(f"{name} is not {b.flatten()[0]:g} everywhere")
        elif n > 16:
            mean = abs(a.mean() - b.mean()).item() / (spread * (2 / n) ** 0.5)
            ratio = abs(float((a.std(unbiased=False) / spread).log())) * n**0.5
            if mean > 6 or ratio > 6:
                out.append(f"{name} has std {a.std():.2g}, not {spread:.2g}")
    return out
