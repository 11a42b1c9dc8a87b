"""Regions of a recorded forward that run in a mode of their own: ``torch.no_grad`` and ``torch.autocast``."""

from __future__ import annotations

import torch
from torch import fx

from launcher.errors import Problem, RequestError


def settle_regions(graphs: torch.nn.Module, key: str) -> bool:
    """Cuts gradients where ``no_grad`` begins, in place; whether there are regions, which torch then unfolds.

    Unfolding forgets what mode an operator ran in. Raises ``RequestError`` for one that computes in other
    dtypes.
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
    """Args: device, dtype, enabled and so on."""
    if node.args[2]:
        text = "the forward computes under torch.autocast, whose dtypes would be lost; cast with .to there"
        raise RequestError((Problem(key, text),))


def _cut(graph: fx.Graph, region: fx.Node) -> None:
    """Each tensor goes in without its gradient; what changes there is changed with no gradient too."""
    detached: dict[fx.Node, fx.Node] = {}
    for given in region.all_input_nodes:
        if isinstance(given.meta.get("val"), torch.Tensor):
            with graph.inserting_before(region):
                detached[given] = graph.call_function(torch.ops.aten.detach.default, (given,))
            detached[given].meta = dict(given.meta)
    for given, without in detached.items():
        region.replace_input_with(given, without)
