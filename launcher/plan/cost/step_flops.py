"""How many floating-point operations a training step takes: what its speed is measured in."""

from __future__ import annotations

from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.facts import Graph

BACKWARD = 2
"""Forwards that a backward costs: a product has two gradients, of its input and of its weight."""


def step_flops(graphs: tuple[Graph, ...], sizes: Sizes) -> int:
    """Of matrix products, attention and convolutions in one optimizer step, over all ranks.

    As others count model FLOPs: what runs again in the backward is left out (``parallel.recompute``), frozen
    weights count as if they had gradients, attention counts in full, causal or not. ``graphs``: of one micro
    batch on one rank of tp, or of its pieces.
    """
    forward = sum(node.flops for graph in graphs for node in graph.nodes)
    return (1 + BACKWARD) * forward * sizes.micros * sizes.replicas * sizes.grid["tp"]
