"""Paths through the graph that autograd has recorded."""

from __future__ import annotations

from typing import Any

import torch


def feeds(made: tuple[torch.Tensor, ...], last: tuple[torch.Tensor, ...]) -> bool:
    """Whether autograd gets from every tensor of ``last`` back to one of ``made``."""
    goals = {t.grad_fn for t in made if t.grad_fn is not None}
    if not goals or not last:
        return False
    oldest = min(g._sequence_nr() for g in goals)
    return all(t.grad_fn is not None and reaches(t.grad_fn, goals, oldest) for t in last)


def reaches(start: Any, goals: set[Any], oldest: int) -> bool:
    """Whether a path leads from ``start`` to a goal; nodes older than the ``oldest`` goal cannot reach it."""
    stack, seen = [start], set()
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        if node is None:  # a tensor of torch.func, whose history is hidden
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following._sequence_nr() >= oldest:
                seen.add(following)
                stack.append(following)
    return False
