"""Finds modules that torch cannot compile to one graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from launcher.parallel.compile import cause, traceable, tracing
from launcher.plan.values.compilation import Compilation

_log = logging.getLogger(__name__)


def graph_breaks(
    model: nn.Module, plan: Compilation, modules: Iterable[str], inputs: Sequence[torch.Tensor], tp: int
) -> dict[str, str]:
    """Returns those of ``modules`` that torch cannot compile to one graph for ``inputs``, with the reasons.

    Operators are split over ``tp`` ranks. ``model`` must not be used afterwards.
    """
    from torch import _dynamo as dynamo

    tried = {name: _Tried(traceable(model.get_submodule(name)), plan) for name in modules}
    for name, forward in tried.items():
        vars(model.get_submodule(name))["forward"] = forward

    # torch's warnings from tracing are not for the user
    with dynamo.config.patch(**tracing(len(tried), tp)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):  # also for tensors that the forward creates
                model(*inputs)
        except Exception as error:
            # the forward may need real tensors, or a mode: the first step will show it
            _log.debug("graph breaks are not known before the first step: %s", error)
    dynamo.reset()
    return {name: forward.why for name, forward in tried.items() if forward.why}


@dataclass
class _Tried:
    """A forward whose first call is traced; ``why`` is the reason if it does not become one graph."""

    plain: Callable[..., Any]
    plan: Compilation
    why: str = field(default="", init=False)
    called: bool = field(default=False, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        if self.called:
            return self.plain(*args, **kwargs)
        self.called = True
        if torch._C._are_functorch_transforms_active():
            self.why = "a transform of torch.func (vmap, grad) calls it"
            return self.plain(*args, **kwargs)
        traced = torch.compile(self.plain, backend="eager", fullgraph=True, dynamic=self.plan.dynamic)
        try:
            return traced(*args, **kwargs)
        except TorchDynamoException as error:
            self.why = cause(error)
        return self.plain(*args, **kwargs)
