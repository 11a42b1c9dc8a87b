"""Reduces level1's gradients group by group while the last backward of a stage goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from launcher.errors import RunError
from launcher.parallel.dispatch.pytree import tree_leaves
from launcher.parallel.fsdp.gather_order import GatherOrder, unreduced

NODE = "RegisterPostBackwardFunctionBackward"
"""What autograd calls the node that FSDP2 puts before a module."""

OFF = "parallel.transformer_opt.grad_computation_allreduce_overlap=false"


class ReduceOrder:
    """The groups of one part in the order in which their gradients are reduced: the same on every rank.

    A group is due once autograd has come back past every call of it in the last micro batch, and those before
    it are. What then has not been due comes after the backward: groups whose inputs take no gradient, and
    what a rank has skipped.
    """

    def __init__(self, order: GatherOrder, early: bool) -> None:
        self._order = order
        self._queue = _queue(order) if early and order.once else ()
        self._calls: dict[int, Counter[int]] = {}  # by micro batch: of each group, those to come back past
        self._unknown: dict[int, set[int]] = {}  # groups with a call that autograd does not come back past
        self._forward: int | None = None
        self._backward: int | None = None
        self._waiting: list[int] = []
        self._reduced: set[int] = set()
        for i in self._queue:
            group = order.groups[i]
            register = group._register_post_backward_hook
            group._register_post_backward_hook = partial(self._enter, i, register)
            group.post_backward = partial(self._finish, i, group.post_backward)

    @contextmanager
    def forward(self, micro: int) -> Iterator[None]:
        """Around a forward that a backward will follow."""
        self._calls[micro], self._unknown[micro] = Counter(), set()
        self._reduced.clear()
        self._forward = micro
        try:
            yield
        finally:
            self._forward = None

    @contextmanager
    def last_backward(self, micro: int) -> Iterator[None]:
        """Around the backward of ``micro``, the last of a step."""
        self._waiting, self._backward = list(self._queue), micro
        yield
        self._backward = None
        while self._waiting:
            self._reduce(self._waiting.pop(0))
        self._calls.clear()
        self._unknown.clear()

    def _enter(self, i: int, register: Any, args: Any, kwargs: Any) -> Any:
        """A module of group ``i`` is called."""
        given = register(args, kwargs)
        micro = self._forward
        if micro is None:
            return given
        nodes = {t.grad_fn for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
        found = [n for n in nodes if n is not None and n.name() == NODE]
        if given[0] is args or len(found) != 1:
            self._unknown[micro].add(i)
        else:
            self._calls[micro][i] += 1
            found[0].register_hook(partial(self._past, micro, i))
        return given

    def _past(self, micro: int, i: int, *grads: Any) -> None:
        """A backward has come back past a call."""
        if micro != self._backward:
            return
        left = self._calls[micro]
        left[i] -= 1
        while self._waiting and self._due(micro, self._waiting[0]):
            self._reduce(self._waiting.pop(0))

    def _due(self, micro: int, i: int) -> bool:
        left = self._calls[micro]
        return i in left and not left[i] and i not in self._unknown[micro]

    def _reduce(self, i: int) -> None:
        """Sum the gradients of a group and drop its weights, as FSDP2 does where none is kept."""
        group = self._order.groups[i]
        group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = True
        with self._order.filling():
            group.post_backward()
        group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False
        self._reduced.add(i)

    def _finish(self, i: int, post_backward: Any, *unused: Any) -> None:
        """FSDP2's own: after a backward, and at the end of a step, where weights are dropped."""
        group = self._order.groups[i]
        if i not in self._reduced:
            post_backward()
            return
        if any(unreduced(p) is not None for p in group.fsdp_params):
            names = ", ".join(m or "the model" for m in self._order.rows[i].modules)
            text = f"{names}: a gradient came after those of its group had been summed"
            raise RunError(f"{text} (try: {OFF})")
        asked, group.reduce_grads = group.reduce_grads, False
        post_backward()
        group.reduce_grads = asked


def _queue(order: GatherOrder) -> tuple[int, ...]:
    """Autograd goes the forward's way back: what was begun first is done last."""
    learning = {i for i, g in order.rows.items() if len(g.idle) < len(g.names)}
    seen = [i for i in reversed(order.begun) if i in learning]
    return tuple(dict.fromkeys([*seen, *sorted(learning - {*seen})]))
