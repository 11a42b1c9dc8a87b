"""Finds in-place changes that autograd does not see, of tensors that would have a gradient without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from launcher.parallel.dispatch.pytree import tree_leaves


class HiddenChanges(fx.Interpreter):
    """Runs the recording of a forward.

    ``found`` has the operations that change, unseen by autograd, the memory of a tensor that has a gradient.
    A forward that is rebuilt without in-place changes would propagate a gradient there that the original does
    not.
    """

    def __init__(self, graphs: fx.GraphModule, outer: HiddenChanges | None = None) -> None:
        super().__init__(graphs, garbage_collect_values=False)
        self.found: list[str] = outer.found if outer else []
        self._lies: defaultdict[int, list[Tensor]] = outer._lies if outer else defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._lies[t.untyped_storage()._cdata].append(t)
        return out

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target) == "wrap_with_set_grad_enabled":
            enabled, region, *given = args
            with torch.set_grad_enabled(enabled):
                return HiddenChanges(region, self).run(*given)
        if isinstance(target, torch._ops.OpOverload):
            self._look(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _look(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for t in written(op, args, kwargs):
            beside = self._lies[t.untyped_storage()._cdata]
            sees = torch.is_grad_enabled() and t.requires_grad and op is not torch.ops.aten.detach_.default
            if not sees and any(other.requires_grad for other in beside):
                self.found.append(op.overloadpacket.__name__)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation's schema marks as written."""
    out: list[Tensor] = []
    for n, said in enumerate(func._schema.arguments):
        if said.alias_info is not None and said.alias_info.is_write:
            given = args[n] if n < len(args) else kwargs.get(said.name)
            out += [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    return out
