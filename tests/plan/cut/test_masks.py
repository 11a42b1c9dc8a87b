"""Which masks each stage computes again, and which tensors are sent for that."""

from __future__ import annotations

from launcher.plan.cut.recomputed_masks import masks
from launcher.plan.values.model_graph import Graph, Node
from launcher.plan.values.tensor_spec import TensorSpec

SHORT, SQUARE = TensorSpec((2, 8), "int64"), TensorSpec((2, 8, 8), "bool")


def node(name: str, target: str, *inputs: str, out: TensorSpec = SQUARE, kind: str = "glue", **more) -> Node:
    return Node(name, kind, target, inputs, (out,), **more)


INPUT = node("documents", "documents", out=SHORT, kind="input", lies=frozenset({0}))
EQUAL = node("eq", "eq", "documents", lies=frozenset({1}))


def test_masks_that_depend_only_on_inputs_are_computed_on_each_stage():
    first = node("first", "getitem", "documents", out=TensorSpec((2, 1), "int64"))
    module = node("layer", "layer", "documents", out=SHORT, kind="module")
    nodes = (INPUT, EQUAL, node("tril", "tril", "eq"), first, module, node("late", "eq", "layer"))
    assert masks(Graph(nodes)) == {"eq", "tril"}


def test_random_or_rounded_values_are_computed_once():
    drawn = node("drawn", "bernoulli", "eq")
    scores = node("scores", "masked_fill", "eq", out=TensorSpec((2, 8, 8), "float32"))
    assert masks(Graph((INPUT, EQUAL, drawn, scores, node("not", "__invert__", "drawn")))) == {"eq"}


def test_values_that_are_written_in_place_are_computed_once():
    writer = node("tril_", "tril_", "eq", writes=frozenset({1}), reads=frozenset({1}))
    assert masks(Graph((INPUT, EQUAL, writer))) == set()
