"""What ``tp`` does to a model: how each operator runs over it, and by which collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.plan.tensor_parallel.module_strategies import Cut, Operator


@dataclass(frozen=True)
class Comm:
    """A collective over ``tp`` in one micro batch; ``nbytes``: the full tensor that it reduces or gathers."""

    op: str
    phase: str
    nbytes: int


@dataclass(frozen=True)
class ShardedOperator:
    """How an operator runs over ``tp``.

    Its input ``arrives`` in one layout and is redistributed to the one that it ``takes``; its output is
    redistributed from the layout that it ``makes`` to the one that it ``gives``. ``sums``: the output on each
    rank is a term of a sum over ``tp``. ``comms`` are the collectives that this needs. ``dims``: the number
    of dims of its input and of its output.
    """

    operator: Operator
    arrives: Cut
    takes: Cut
    makes: Cut
    sums: bool
    gives: Cut
    comms: tuple[Comm, ...] = ()
    dims: tuple[int, int] = (0, 0)


def all_reduced(spread: ShardedOperator) -> bool:
    """Returns true if the output is summed over ``tp`` and each rank then has the full tensor."""
    return spread.sums and spread.gives is None


@dataclass(frozen=True)
class TensorParallelPlan:
    """The tensor-parallel plan of a model: its operators in the order in which they run.

    ``partial``: uncut parameters (first names) whose gradient on each rank is a term of a sum over ``tp``.
    ``output`` is the dim of the model's output that ``tp`` cuts. ``bias_in_terms``: an output that an
    all-reduce sums over ``tp`` gets its bias before the sum, on the first rank; otherwise after it, on each
    rank. ``overlapped``: modules that send their input gradient while they compute their weight gradient.
    """

    spreads: tuple[ShardedOperator, ...] = ()
    partial: tuple[str, ...] = ()
    output: Cut = None
    bias_in_terms: bool = False
    overlapped: tuple[str, ...] = ()


UNCUT = TensorParallelPlan()
"""The plan of a model without operators over ``tp``."""


def uncalled(operators: Sequence[Operator], leaves: Sequence[str] | None) -> list[Problem]:
    """Returns the problems of operators that are cut into stages: no stage calls them as one module."""
    return [
        Problem(o.where, f"{o.module} is cut into pipeline stages; name modules inside it")
        for o in operators
        if leaves is not None and not any(o.module == m or o.module.startswith(m + ".") for m in leaves)
    ]
