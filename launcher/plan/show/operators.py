"""The rows of a plan about operators over ``tp``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from launcher.plan.tensor_parallel.module_strategies import Cut, tp_dim
from launcher.plan.tensor_parallel.sharded_operators import Comm, ShardedOperator, TensorParallelPlan
from launcher.plan.tensor_parallel.strategy_reader import axes_text
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import bytes_text, many

NAMES = {"all_gather": "all-gather", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
Rows = Iterator[tuple[str, str]]


def operator_rows(flow: TensorParallelPlan, output: Sequence[TensorSpec], ways: int) -> Rows:
    """Yields one row for equal operators, and one for what all of them send.

    ``output``: the model's output on a rank; ``ways``: the size of ``tp``.
    """
    alike: dict[tuple[object, ...], list[ShardedOperator]] = {}
    for s in flow.spreads:
        o = s.operator
        alike.setdefault((o.key, o.kind, o.weights, s.arrives, s.takes, s.makes, s.gives), []).append(s)
    for same in alike.values():
        yield "operators", _row(same)
    if flow.output is not None:
        size = sum(t.nbytes // t.shape[-1] for t in output)  # one number for each position
        sent = f"2 all-reduces forward ({bytes_text(3 * size)})"
        yield "operators", f"loss: over {ways} parts of the classes; {sent}"
    if flow.spreads:
        yield "operators", f"together: {_sent([c for s in flow.spreads for c in s.comms])} a micro batch"


def collectives_text(sent: Sequence[tuple[str, int]]) -> str:
    """Returns collectives as text, if only their kinds and bytes are known.

    >>> collectives_text([("all_reduce", 1024), ("all_reduce", 1024)])
    '2 all-reduces (2.0 KB)'
    """
    kinds = dict.fromkeys(op for op, _ in sent)
    sizes = {op: [n for kind, n in sent if kind == op] for op in kinds}
    return ", ".join(f"{many(len(ns), NAMES[op])} ({bytes_text(sum(ns))})" for op, ns in sizes.items())


def _row(same: list[ShardedOperator]) -> str:
    first = same[0]
    o = first.operator
    kinds = {"": o.kind, "column": "linear by columns", "row": "linear by rows"}
    kind = kinds.get(o.mode, f"embedding by {o.mode}")
    count = f" ({many(len(same), 'module')})" if len(same) > 1 else ""
    cut = ", ".join(f"{n} {axes_text(axes)}" for n, axes in o.weights if tp_dim(axes) is not None)
    sent = [c for s in same for c in s.comms]
    ways = f"input {_change(first.arrives, first.takes)}, output {_out(first)}"
    text = ", ".join(part for part in (f"{o.key}{count}: {kind}", cut, ways) if part)
    return f"{text}; {_sent(sent)}" if sent else text


def _change(before: Cut, after: Cut) -> str:
    return _words(before) if before == after else f"{_words(before)} -> {_words(after)}"


def _out(s: ShardedOperator) -> str:
    return f"partial -> {_words(s.gives)}" if s.sums else _change(s.makes, s.gives)


def _words(cut: Cut) -> str:
    return "full" if cut is None else f"cut on dim {cut}"


def _sent(comms: Sequence[Comm]) -> str:
    """Returns as text how many collectives of each kind run, and the bytes of the full tensors in them."""
    if not comms:
        return "nothing sent"
    order = sorted(comms, key=lambda c: (c.phase != "forward", c.op))
    out = []
    for (phase, op), some in groupby(order, key=lambda c: (c.phase, c.op)):
        group = list(some)
        out.append(f"{many(len(group), NAMES[op])} {phase} ({bytes_text(sum(c.nbytes for c in group))})")
    return ", ".join(out)
