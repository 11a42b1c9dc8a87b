"""A transformer block: what is inferred from two operators, and what is found if nothing is written."""

from __future__ import annotations

import itertools

import pytest

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.search.candidates import strategy
from launcher.extras.device_matrix.search.cost import CostModel, graph_cost
from launcher.extras.device_matrix.search.explore import propagate
from tests.extras.device_matrix.search.recorded import block, megatron
from tests.extras.device_matrix.search.small_graphs import rules_of
from tests.tiers import some

LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)


def node_of(graph: OpGraph, module: str) -> int:
    return next(n for n, node in enumerate(graph.nodes) if node.module == module)


def test_projections_by_columns_and_an_output_by_rows_give_megatrons_plan() -> None:
    graph = block(1, 2048)
    rules = rules_of(graph)
    written = {node_of(graph, f"attn.{m}"): strategy((("n", 8),), 8) for m in "qkv"}
    written[node_of(graph, "attn.o")] = strategy((("k", 8),), 8)
    found = propagate(graph, rules, 8, written)
    assert all(found.strategies[n] == s for n, s in written.items())
    cut = {m: dict(found.strategies[node_of(graph, f"mlp.{m}")].axes) for m in ("gate", "up", "down")}
    assert cut == {"gate": {"n": (0,)}, "up": {"n": (0,)}, "down": {"k": (0,)}}
    said = [line for line in map(str, found.reasons) if ": mlp." in line or ": mlp," in line]
    assert said == [
        "inferred: mlp.gate: columns, saves an all-gather of 98.0 MB",
        "inferred: mlp, 2 light operators: features",
        "inferred: mlp.up: columns, saves an all-gather of 98.0 MB",
        "inferred: mlp.down: rows, saves an all-gather of 98.0 MB",
    ]
    norms = [line for line in map(str, found.reasons) if "_norm" in line]
    assert [line.partition(",")[0] for line in norms] == [
        "inferred: attn_norm: sequence",
        "inferred: mlp_norm: sequence",
    ]


@pytest.mark.parametrize(("positions", "ranks"), some(list(itertools.product(LENGTHS, (8, 16, 32, 64))), one_in=4))
def test_nothing_written_is_never_worse_than_megatrons_plan(positions: int, ranks: int) -> None:
    graph = block(8, positions)
    rules = rules_of(graph)
    found = propagate(graph, rules, ranks, {})
    for tp in (n for n in (1, 2, 4, 8) if 8 % (ranks // n) == 0):
        for sequence in (False, True):
            plan = megatron(graph, rules, ranks, tp, sequence)
            hand = graph_cost(graph, rules, plan, CostModel())
            assert found.cost.predicted <= hand.predicted, (tp, sequence)
