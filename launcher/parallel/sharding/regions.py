"""Regions of a recorded forward that run in another mode: ``torch.no_grad`` and ``torch.autocast``."""

from __future__ import annotations

import torch
from torch import fx

from launcher.errors import Problem, RequestError


def settle_regions(graphs: torch.nn.Module, key: str) -> bool:
    """Detach tensors that enter ``no_grad`` regions, in place; returns whether any region must be unfolded.

    Unfolding by torch forgets the mode of an operator. Raises ``RequestError`` for regions under autocast,
    whose dtypes would be lost.
    """
    found = False
    for module in graphs.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if str(node.target) == "wrap_with_autocast":
                found = True
                _refuse(node, key)
            if str(node.target) == "wrap_with_set_grad_enabled":
                found = True
                if node.args[0] is False:
                    _cut(module.graph, node)
        module.recompile()
    return found


def _refuse(node: fx.Node, key: str) -> None:
    """Refuse an enabled autocast; the node's arguments are device, dtype, enabled and so on."""
    if node.args[2]:
        text = "the forward computes under torch.autocast, whose dtypes would be lost; cast with .to there"
        raise RequestError((Problem(key, text),))


def _cut(graph: fx.Graph, region: fx.Node) -> None:
    """Detach each tensor that enters ``region``; in-place changes there have no gradient either."""
    detached: dict[fx.Node, fx.Node] = {}
    for given in region.all_input_nodes:
        if isinstance(given.meta.get("val"), torch.Tensor):
            with graph.inserting_before(region):
                detached[given] = graph.call_function(torch.ops.aten.detach.default, (given,))
            detached[given].meta = dict(given.meta)
    for given, without in detached.items():
        region.replace_input_with(given, without)
