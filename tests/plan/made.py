"""Requests and models made of plain values, for tests of the planner."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import pytest

from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.plan import Plan, ask, leaves, plan
from launcher.plan.resolve.stage_config import StageRequest
from launcher.plan.values.model_graph import Graph, ModelStructure, Node, Param
from launcher.plan.values.tensor_spec import TensorSpec


def job(*overrides: str) -> Job:
    """A language model on one rank, with these overrides."""
    return compose(["recipe=lm_single", *overrides]).job


def words(error: RequestError) -> list[str]:
    """Return the words of every cure, split as the shell splits them."""
    return [word for problem in error.problems for word in shlex.split(problem.cure)]


def refusal(*overrides: str) -> RequestError:
    """Return the error of a request that is refused before the model is read."""
    with pytest.raises(RequestError) as caught:
        ask(job(*overrides))
    return caught.value


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def skeleton(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    same: Mapping[str, str] | None = None,
    frozen: Sequence[str] = (),
    buffers: Sequence[str] = (),
    containers: Sequence[str] = (),
    bare: Sequence[str] = (),
) -> ModelStructure:
    """Return a model with tensors of these names and shapes; ``bare`` are modules without tensors."""
    owners = [n.rpartition(".")[0] for n in shapes] + list(bare)
    names = [".".join(o.split(".")[: i + 1]) for o in owners if o for i in range(o.count(".") + 1)]
    params = tuple(
        Param(n, spec(*shape), (same or {}).get(n, n), n not in frozen and n not in buffers, n in buffers)
        for n, shape in shapes.items()
    )
    return ModelStructure(tuple(dict.fromkeys(names)), params, frozenset(containers))


def graph(*rows: str, out: Mapping[str, tuple[TensorSpec, ...] | None] | None = None) -> Graph:
    """Return a graph with one node per row: ``name: kind target < inputs``, where ``.`` is the root.

    Each node yields its ``out``, or else float32[2, 4], and all but the inputs get a gradient. Every module costs 10
    flops and saves 8 bytes.
    """
    nodes: list[Node] = []
    for row in rows:
        head, _, inputs = row.partition("<")
        name, _, what = head.partition(":")
        kind, target = what.replace(" . ", "  ").split(" ")[1:3]
        made = (out or {}).get(name, (spec(2, 4),))
        cost = (8, 10) if kind == "module" else (0, 0)
        trains = frozenset(inputs.split()) - {n.name for n in nodes if n.kind == "input"}
        node = Node(name, kind, target, tuple(inputs.split()), made, len(made or ()) > 1, *cost, trains=trains)
        nodes.append(node)
    return Graph(tuple(nodes))


def chain(*modules: str) -> Graph:
    """``modules`` called one after the other."""
    names = ["x", *(f"v{i}" for i in range(len(modules)))]
    rows = [f"{b}: module {m} < {a}" for m, a, b in zip(modules, names, names[1:], strict=False)]
    return graph("x: input x", *rows, f"output: output output < {names[-1]}")


def planned(j: Job, model: ModelStructure, glue: Graph) -> Plan:
    """The plan of ``j`` for a model that is made of plain values."""
    asked: StageRequest = ask(j)
    return plan(j, asked, TracedModel(model, glue, leaves(asked, model)))
