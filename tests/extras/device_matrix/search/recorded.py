"""Blocks of a Llama as graphs, and hand-written Megatron plans for them."""

from __future__ import annotations

from functools import cache

import torch

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.run.record import record
from launcher.extras.device_matrix.search.candidates import dims_of_model, ordered, strategy
from launcher.job.schema.models import LanguageModel
from launcher.models.defaults import resolve
from launcher.models.language_model import Block


@cache
def block(batch: int, positions: int, dim: int = 4096, heads: int = 32, kv_heads: int = 8, ffn: int = 14336) -> OpGraph:
    """Record a block; the default sizes are those of the model with 8 billion parameters."""
    settings = LanguageModel(name="lm", vocab_size=64, dim=dim, layers=1, heads=heads, kv_heads=kv_heads, ffn_dim=ffn)
    resolved, _ = resolve(settings)
    with torch.device("meta"):
        module = Block(resolved)
        x = torch.empty(batch, positions, dim, requires_grad=True)
    return record(module, [x])


def megatron(
    graph: OpGraph, rules: tuple[OpRule | None, ...], ranks: int, tp: int, sequence: bool
) -> tuple[OpStrategy, ...]:
    """Return Megatron's plan.

    Columns, heads and rows are split over tp, the batch over the other ranks. With ``sequence``, tp also splits the
    activations between them.
    """
    dims = dims_of_model(graph, rules)
    at = {node.module: n for n, node in enumerate(graph.nodes) if node.kind == "linear"}
    cut = {dims[at[m]]["n"] for m in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")}
    norm = next(n for n, node in enumerate(graph.nodes) if node.module == "attn_norm")
    rule = rules[norm]
    assert rule is not None
    batch, positions = (dims[norm][x] for x in rule.ins[0][:2])
    out = []
    for n, made_of in enumerate(rules):
        if made_of is None:
            out.append(strategy((), ranks))
            continue
        letters = ordered(made_of, dims[n])
        cuts = [(x, ranks // tp) for x, _ in letters if dims[n][x] == batch]
        inner = [(x, tp) for x, _ in letters if dims[n][x] in cut]
        if not inner and sequence:
            inner = [(x, tp) for x, _ in letters if dims[n][x] == positions and cuts]
        out.append(strategy(tuple((x, k) for x, k in (*cuts, *inner[:1]) if k > 1), ranks))
    return tuple(out)
