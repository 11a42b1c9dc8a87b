"""Letters of operators: which dims are split together, which give sums, and which need collectives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from launcher.extras.device_matrix.op_graph import Arg, OpGraph, OpNode, Ref, Value
from launcher.extras.device_matrix.rules.table import rule_of, uncut_rule
from launcher.plan.values.tensor_spec import TensorSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """An operator on tensors of shapes ``ins``, then constants ``after``."""

    op: str
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]
    after: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()

    def graph(self) -> OpGraph:
        values = tuple(Value(TensorSpec(shape, "float32"), True) for shape in (*self.ins, *self.outs))
        refs = tuple(Ref(i) for i in range(len(self.ins)))
        outs = tuple(range(len(self.ins), len(values)))
        node = OpNode(self.op, "", (*refs, *self.after), self.kwargs, outs)
        return OpGraph(values, tuple(range(len(self.ins))), (), (node,), outs)


def shown(call: Call) -> str:
    """Return the rule as ``m.k n.k -> m.n; sizes; sums k; inside c``, with ``_`` for a dim that is not split."""
    graph = call.graph()
    rule = rule_of(graph.nodes[0], graph)
    if rule is None:
        return "none"
    ins, outs = (" ".join(".".join(x or "_" for x in ls) or "()" for ls in side) for side in (rule.ins, rule.outs))
    sizes = ",".join(f"{letter}{n}" for letter, n in rule.sizes)
    more = [f"sums {','.join(rule.sums)}"] * bool(rule.sums) + [f"inside {','.join(rule.inside)}"] * bool(rule.inside)
    return "; ".join([f"{ins} -> {outs}", sizes, *more])


CALLS = {
    "linear": (Call("linear", ((8, 4, 6), (10, 6), (10,)), ((8, 4, 10),)),
               "d0.d1.k n.k n -> d0.d1.n; d08,d14,k6,n10; sums k"),
    "broadcast": (Call("add.Tensor", ((8, 1, 6), (4, 6)), ((8, 4, 6),)), "d0._.d2 d1.d2 -> d0.d1.d2; d08,d26,d14"),
    "a dim of one": (Call("relu", ((8, 1),), ((8, 1),)), "d0._ -> d0._; d08"),
    "split dims": (Call("view", ((8, 12),), ((8, 3, 4),), ((8, 3, 4),)), "d0.d1 -> d0.d1._; d08,d13"),
    "merged dims": (Call("view", ((2, 3, 4),), ((6, 4),), ((6, 4),)), "d0._.d1 -> d0.d1; d02,d14"),
    "split another way": (Call("reshape", ((6, 4),), ((4, 6),), ((4, 6),)), "d0._ -> d0._; d02"),
    "nothing left": (Call("view", ((3, 5),), ((5, 3),), ((5, 3),)), "_._ -> _._; "),
    "grouped heads": (
        Call("scaled_dot_product_attention", ((2, 8, 4, 6), (2, 4, 4, 6), (2, 4, 4, 6)), ((2, 8, 4, 6),),
             (None, 0.0, True), (("enable_gqa", True),)),
        "d0.d1.l._ d0.d1._._ d0.d1._._ -> d0.d1.l._; d02,d14,l4",
    ),
    "dropped attention": (
        Call("scaled_dot_product_attention", ((2, 4, 6),) * 3, ((2, 4, 6),), (None, 0.1)), "none",
    ),
    "embedding": (Call("embedding", ((12, 6), (4, 2)), ((4, 2, 6),)), "v.h d0.d1 -> d0.d1.h; v12,h6,d04,d12; sums v"),
    "convolution": (Call("conv2d", ((4, 6, 5, 5), (8, 6, 3, 3), (8,)), ((4, 8, 3, 3),)),
                    "n.i._._ o.i._._ o -> n.o._._; n4,i6,o8; sums i"),
    "convolution of groups": (
        Call("conv1d", ((4, 6, 5), (12, 2, 3)), ((4, 12, 3),), (None, (1,), (0,), (1,), 3)),
        "n.g._ g._._ -> n.g._; n4,g3",
    ),
    "batch norm": (Call("batch_norm", ((4, 6, 5), (6,), (6,), (6,), (6,)), ((4, 6, 5),), (True, 0.1, 1e-5, False)),
                   "n.c.s0 c c c c -> n.c.s0; n4,c6,s05; inside n,s0"),
    "mean": (Call("mean.dim", ((4, 6),), ((4,),), ((1,),)), "d0.d1 -> d0; d04,d16; sums d1"),
    "largest": (Call("amax", ((4, 6),), ((4, 1),), ((1,), True)), "d0._ -> d0._; d04"),
    "softmax": (Call("softmax.int", ((4, 6),), ((4, 6),), (-1,)), "d0.d1 -> d0.d1; d04,d16; inside d1"),
    "cross entropy": (Call("cross_entropy_loss", ((4, 6), (4,)), ((),)), "n.c n -> (); n4,c6; sums n,c; inside n,c"),
    "unknown": (Call("lstm.input", ((4, 6),), ((4, 6),)), "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_rule_of_an_operator_has_the_expected_letters(name: str) -> None:
    call, expected = CALLS[name]
    assert shown(call) == expected


def test_an_operator_without_a_rule_takes_and_returns_full_tensors() -> None:
    graph = Call("lstm.input", ((4, 6), (2,)), ((4, 6),)).graph()
    rule = uncut_rule(graph.nodes[0], graph)
    assert (rule.ins, rule.outs, rule.sizes) == ((("", ""), ("",)), (("", ""),), ())
