"""Buckets of reduce-scatters, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from launcher.errors import RunError
from launcher.parallel.dispatch.modes import tree_leaves
from launcher.parallel.fsdp.gather import GatherOrder, unreduced
from launcher.parallel.fsdp.shard import SUMS_APART
from launcher.plan.plan import Plan

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The function has the first name since torch 2.13, which deprecates the second one."""


class ReduceScatter:
    """A reduction of the gradients of FSDP2's ``params``, all of one dtype, to this rank's shards.

    The memory layout is FSDP2's, so that results are bit-equal: all that a rank keeps is contiguous. Only
    ``proceed`` and ``end`` wait; every rank calls them in the same order.
    """

    def __init__(self, params: Sequence[Any], grads: Sequence[Tensor], dtype: torch.dtype) -> None:
        mesh = params[0].mesh_info
        self._params = params
        self._replicas: dist.ProcessGroup | None = getattr(mesh, "replicate_process_group", None)
        group: dist.ProcessGroup = mesh.shard_process_group
        ranks = group.size()

        # each rank's shards, side by side
        full_grads = [_rows_first(p, g, ranks) for p, g in zip(params, grads, strict=True)]
        self._kept = [_padded(g, ranks) // ranks for g in full_grads]
        send_buffer = torch.empty(ranks * sum(self._kept), dtype=dtype, device=full_grads[0].device)
        torch._chunk_cat(full_grads, dim=0, num_chunks=ranks, out=send_buffer.view(ranks, -1))

        # the collective is in flight, and reads its input until it is done
        self._send_buffer: Tensor | None = send_buffer
        self._out = torch.empty(sum(self._kept), dtype=dtype, device=send_buffer.device)
        self._work: Any = _reduce_scatter(self._out, send_buffer, group=group, async_op=True)

    def proceed(self) -> None:
        """Waits for the scatter, frees its input, and starts the sum over replicas."""
        if self._send_buffer is None:
            return
        self._wait()
        self._send_buffer = None
        if self._replicas is not None:
            self._work = dist.all_reduce(self._out, group=self._replicas, async_op=True)

    def end(self) -> None:
        """Waits, and adds the result to the gradients of the shards."""
        self.proceed()
        self._wait()
        out = self._out.to(self._params[0].orig_dtype)
        at = 0
        for p, kept in zip(self._params, self._kept, strict=True):
            mine = out.as_strided(p.sharded_size, p.contiguous_sharded_stride, at)
            at += kept
            if p.sharded_param.grad is None:
                p.sharded_param.grad = p.to_sharded_dtensor(mine)
            else:
                p.sharded_param.grad._local_tensor += mine

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _rows_first(p: Any, grad: Tensor, ranks: int) -> Tensor:
    """Returns the gradient's chunks, one per rank, concatenated along dim 0."""
    dim = p.fsdp_placement.dim
    return grad if dim == 0 else torch.cat(grad.chunk(ranks, dim), 0)


def _padded(grad: Tensor, ranks: int) -> int:
    """Returns the size of a gradient whose rows are padded to a multiple of ``ranks``."""
    rows, *rest = grad.shape
    return -(-rows // ranks) * ranks * prod(rest)


NODE = "RegisterPostBackwardFunctionBackward"
"""Autograd's name of the node that FSDP2 puts before a module."""

OFF = "parallel.transformer_opt.grad_computation_allreduce_overlap=false"


@dataclass(frozen=True)
class _Bucket:
    """FSDP2's parameters whose gradients share a collective, and their groups."""

    name: str
    params: tuple[Any, ...]
    groups: tuple[int, ...]


class ReduceOrder:
    """The buckets of one part in the plan's order, which is the same on every rank.

    A bucket is due once autograd, in the last micro batch, has passed every call of its groups, and the
    buckets before it are due. The other buckets follow after the backward: groups whose inputs need no
    gradient, and those that a rank has skipped.
    """

    def __init__(self, order: GatherOrder, plan: Plan) -> None:
        self._order = order
        self._early = plan.reduces_early
        self._queue = tuple(_buckets(order, plan))
        self._calls: dict[int, Counter[int]] = {}  # by micro batch: calls of each group still to be passed
        self._unknown: dict[int, set[int]] = {}  # groups with a call that autograd does not pass
        self._forward: int | None = None
        self._backward: int | None = None
        self._waiting: list[_Bucket] = []
        self._closed: set[int] = set()
        self._under_way: list[ReduceScatter] = []
        for i in {i for b in self._queue for i in b.groups}:
            group = order.groups[i]
            register = group._register_post_backward_hook
            group._register_post_backward_hook = partial(self._enter, i, register)
            group.post_backward = partial(self._finish, i, group.post_backward)

    @contextmanager
    def forward(self, micro: int) -> Iterator[None]:
        """Enters around a forward that a backward will follow."""
        self._calls[micro], self._unknown[micro] = Counter(), set()
        self._closed.clear()
        self._waiting = list(self._queue)
        self._forward = micro
        try:
            yield
        finally:
            self._forward = None

    @contextmanager
    def last_backward(self, micro: int) -> Iterator[None]:
        """Enters around the backward of ``micro``, the last of a step."""
        self._backward = micro if self._early else None
        yield
        self._backward = None

    def flush(self) -> None:
        """Sends all remaining buckets, after the last backward."""
        while self._waiting:
            self._send(self._waiting.pop(0))
        self._calls.clear()
        self._unknown.clear()

    def end(self) -> None:
        """Waits for all reductions at the end of a step: the shards have their gradients then."""
        for scatter in self._under_way:
            scatter.end()
        self._under_way.clear()

    def _enter(self, i: int, register: Any, args: Any, kwargs: Any) -> Any:
        """Counts a call of a module of group ``i``, and registers a hook for its backward."""
        registered = register(args, kwargs)
        micro = self._forward
        if micro is None:
            return registered
        nodes = {t.grad_fn for t in tree_leaves(registered) if isinstance(t, torch.Tensor)}
        fsdp_nodes = [n for n in nodes if n is not None and n.name() == NODE]
        if registered[0] is args or len(fsdp_nodes) != 1:
            self._unknown[micro].add(i)
        else:
            self._calls[micro][i] += 1
            fsdp_nodes[0].register_hook(partial(self._past, micro, i))
        return registered

    def _past(self, micro: int, i: int, *grads: Any) -> None:
        """Notes that the backward has passed a call, and sends the buckets that are due."""
        if micro != self._backward:
            return
        self._calls[micro][i] -= 1
        while self._waiting and all(self._due(micro, at) for at in self._waiting[0].groups):
            self._send(self._waiting.pop(0))

    def _due(self, micro: int, i: int) -> bool:
        calls = self._calls[micro]
        return i in calls and not calls[i] and i not in self._unknown[micro]

    def _send(self, bucket: _Bucket) -> None:
        """Sends the gradients of a bucket and frees the weights of its groups.

        The previous bucket may still be in flight.
        """
        for i in bucket.groups:
            if i not in self._closed:
                self._order.fill_missing_gradients(i)
                self._order.groups[i]._to_sharded()
                self._closed.add(i)
        for before in self._under_way[-1:]:
            before.proceed()
        for before in self._under_way[:-1]:
            before.end()
        del self._under_way[:-1]

        with record_function(f"scatter ({bucket.name})"):
            grads = [_take(p) for p in bucket.params]
            dtype = self._order.groups[bucket.groups[0]]._reduce_dtype or grads[0].dtype
            self._under_way.append(ReduceScatter(bucket.params, grads, dtype))

    def _finish(self, i: int, post_backward: Any, *unused: Any) -> None:
        """Runs FSDP2's own hook without a reduction, after a backward and at the end of a step.

        Raises ``RunError`` if a gradient came after its group was reduced.
        """
        group = self._order.groups[i]
        if (
            not self._waiting
            and i in self._closed
            and any(unreduced(p) is not None for p in group.fsdp_params)
        ):
            names = ", ".join(m or "the model" for m in self._order.rows[i].modules)
            text = f"{names}: a gradient arrived after the gradients of its group had been reduced"
            raise RunError(f"{text} (try: {OFF})")
        reduce_grads, group.reduce_grads = group.reduce_grads, False
        post_backward()
        group.reduce_grads = reduce_grads


def _buckets(order: GatherOrder, plan: Plan) -> Iterator[_Bucket]:
    of = {id(t): p.name for p, _, t in order.part.named(plan.params)}
    group_of, param_of = {}, {}
    for i, group in order.groups.items():
        for n, p in enumerate(group.fsdp_params):
            name = of[id(p.sharded_param)]
            group_of[name], param_of[name] = i, (n, p)

    for bucket in plan.scatters:
        if bucket.stage != order.part.stage.index:
            continue
        groups = list(dict.fromkeys(group_of[n] for n in bucket.names))
        names = sorted(bucket.names, key=lambda n: (groups.index(group_of[n]), param_of[n][0]))
        modules = ", ".join(m or "root" for i in groups for m in order.rows[i].modules)
        yield _Bucket(modules, tuple(param_of[n][1] for n in names), tuple(groups))


def _take(p: Any) -> torch.Tensor:
    """Removes the full gradient from FSDP2's parameter, and returns it."""
    grad: torch.Tensor
    if SUMS_APART and p.unsharded_accumulated_grad is not None:
        grad, p.unsharded_accumulated_grad = p.unsharded_accumulated_grad_data, None
    else:
        grad, p.unsharded_param.grad = p.unsharded_grad_data, None
    return grad
