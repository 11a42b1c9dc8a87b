"""How operators send the gradients of their inputs over ``tp``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator

COLLECTIVES = {
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "MorphReduceScatter": "reduce_scatter",
    "AllGather": "all_gather",
    "MorphAllGather": "all_gather",
    "AlltoAll": "all_to_all",
    "AlltoAllV": "all_to_all",
}
"""MindSpore's names of our collectives. No operator here sends an all-to-all."""
EVERY = frozenset(COLLECTIVES.values())


@dataclass(frozen=True)
class InputGradients:
    """The modules that send the gradient of their input over ``tp``.

    The modules ``beside`` send it while they compute their weight gradient. The ``compiled`` ones wait until
    it is sent, and so do all modules if backwards are split (``late``).
    """

    beside: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    late: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.beside) + len(self.compiled) + len(self.late)


def named(value: bool | str) -> frozenset[str]:
    """Returns the collectives that a switch selects: all, none, or those that it names.

    >>> sorted(named("AllReduce, MorphReduceScatter"))
    ['all_reduce', 'reduce_scatter']
    """
    if isinstance(value, bool):
        return EVERY if value else frozenset()
    return frozenset(COLLECTIVES[name.strip()] for name in value.split(",") if name.strip())


def known(value: str) -> bool:
    """Returns true if ``value`` names at least one collective and nothing else."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    return bool(names) and all(name in COLLECTIVES for name in names)


def input_gradients_of(
    spreads: Iterable[ShardedOperator],
    ops: Collection[str],
    learn: Collection[str],
    compiled: Collection[str],
    *,
    late: bool,
) -> InputGradients:
    """Returns how operators that send by one of ``ops`` send their input gradients.

    Args:
        spreads: the operators that are cut over ``tp``.
        ops: collectives.
        learn: names of the parameters that are trained.
        compiled: operators that torch compiles.
        late: weight gradients are computed after a split backward has sent the input gradients.
    """
    modules = [s.operator.module for s in spreads if sends(s) in ops and _learns(s, learn)]
    if late:
        return InputGradients(late=tuple(modules))
    return InputGradients(
        beside=tuple(m for m in modules if m not in compiled),
        compiled=tuple(m for m in modules if m in compiled),
    )


def sends(s: ShardedOperator) -> str | None:
    """Returns the collective by which a linear layer sends the gradient of its input, or ``None``.

    If consecutive layers share one input, the first of them sends it.
    """
    back = [c.op for c in s.comms if c.phase == "backward"]
    if s.operator.kind != "linear":
        return None
    if s.operator.mode == "column":
        return back[0] if back and s.makes else None
    if s.takes is None or s.takes == s.arrives:
        return None

    # a replicated input may need no gradient; then only the gradient of the output is gathered
    cut_again = s.gives is not None and (s.sums or s.gives != s.makes)
    out = [c for c in s.comms if c.phase == "forward" and c.op != "all_reduce"] if cut_again else []
    return "all_gather" if s.arrives is not None or len(back) > len(out) else None


def _learns(s: ShardedOperator, learn: Collection[str]) -> bool:
    """Returns true if the layer has a weight gradient to compute while the input gradient is sent.

    The bias of a row-parallel layer does not count, because it is added after the sum.
    """
    names = ("weight",) if s.operator.mode == "row" else ("weight", "bias")
    return any(f"{s.operator.module}.{name}" in learn for name in names)
