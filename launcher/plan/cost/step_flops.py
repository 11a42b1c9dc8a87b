"""The floating-point operations of a training step, in which its speed is measured."""

from __future__ import annotations

from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.facts import Graph

BACKWARD = 2
"""The cost of a backward in forwards: a product has two gradients, of its input and of its weight."""


def step_flops(graphs: tuple[Graph, ...], sizes: Sizes) -> int:
    """Returns the flops of matrix products, attention and convolutions in one optimizer step of all ranks.

    This follows the usual definition of model FLOPs: forwards that the backward runs again do not count
    (``parallel.recompute``), frozen weights count as if they had gradients, and attention counts in full,
    causal or not. ``graphs``: of one micro batch on one rank of tp, or of its pieces.
    """
    forward = sum(node.flops for graph in graphs for node in graph.nodes)
    return (1 + BACKWARD) * forward * sizes.micros * sizes.replicas * sizes.grid["tp"]
