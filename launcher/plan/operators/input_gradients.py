"""Matmuls that send the gradient of their input over ``tp``, and which do so while they compute another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from launcher.plan.operators.resolve import Spread

COLLECTIVES = {
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "MorphReduceScatter": "reduce_scatter",
    "AllGather": "all_gather",
    "MorphAllGather": "all_gather",
    "AlltoAll": "all_to_all",
    "AlltoAllV": "all_to_all",
}
"""MindSpore's names of ours, and of one that no operator here sends."""

EVERY = frozenset(COLLECTIVES.values())


@dataclass(frozen=True)
class InputGradients:
    """Modules whose input gradient is sent while their weight gradient is computed.

    Those that torch compiles send and wait, and so do all where a backward is split (``late``).
    """

    beside: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    late: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.beside) + len(self.compiled) + len(self.late)


def named(value: bool | str) -> frozenset[str]:
    """The collectives that a switch takes in: all, none, or those of some names.

    >>> sorted(named("AllReduce, MorphReduceScatter"))
    ['all_reduce', 'reduce_scatter']
    """
    if isinstance(value, bool):
        return EVERY if value else frozenset()
    return frozenset(COLLECTIVES[name.strip()] for name in value.split(",") if name.strip())


def known(value: str) -> bool:
    """Whether it names collectives only, and one at least."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    return bool(names) and all(name in COLLECTIVES for name in names)


def resolve(
    spreads: Iterable[Spread],
    ops: Collection[str],
    learn: Collection[str],
    compiled: Collection[str],
    *,
    late: bool,
) -> InputGradients:
    """Of those that send by one of ``ops``.

    ``learn``: names of parameters; ``compiled``: operators that torch compiles.
    """
    found = [s.operator.module for s in spreads if sends(s) in ops and _learns(s, learn)]
    if late:
        return InputGradients(late=tuple(found))
    return InputGradients(
        beside=tuple(m for m in found if m not in compiled),
        compiled=tuple(m for m in found if m in compiled),
    )


def sends(s: Spread) -> str | None:
    """By which collective a linear layer sends the gradient of its input.

    Of neighbours that share one input the first does.
    """
    back = [c.op for c in s.comms if c.phase == "backward"]
    if s.operator.kind != "linear":
        return None
    if s.operator.mode == "column":
        return back[0] if back and s.makes else None
    if s.takes is None or s.takes == s.arrives:
        return None

    # what arrives whole may have no gradient, while that of what goes out is gathered
    cut_anew = s.gives is not None and (s.sums or s.gives != s.makes)
    out = [c for c in s.comms if c.phase == "forward" and c.op != "all_reduce"] if cut_anew else []
    return "all_gather" if s.arrives is not None or len(back) > len(out) else None


def _learns(s: Spread, learn: Collection[str]) -> bool:
    """Whether there is another gradient to compute: a row-parallel layer's bias is added after the sum."""
    names = ("weight",) if s.operator.mode == "row" else ("weight", "bias")
    return any(f"{s.operator.module}.{name}" in learn for name in names)
