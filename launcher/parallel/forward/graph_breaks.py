"""What torch cannot make one graph of, found on meta tensors before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from launcher.parallel.forward.compile import cause, traceable, tracing
from launcher.plan.values.compilation import Compilation


def graph_breaks(
    model: nn.Module, plan: Compilation, modules: Iterable[str], inputs: Sequence[torch.Tensor], tp: int
) -> dict[str, str]:
    """Those of ``modules`` that are no one graph in a forward of ``inputs``, and why.

    Operators are cut over ``tp`` ranks. ``model`` is used up.
    """
    from torch import _dynamo as dynamo

    tried = {name: _Tried(traceable(model.get_submodule(name)), plan) for name in modules}
    for name, forward in tried.items():
        vars(model.get_submodule(name))["forward"] = forward

    # what torch warns of while it traces is its own affair
    with dynamo.config.patch(**tracing(len(tried), tp)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(*inputs)
    dynamo.reset()
    return {name: forward.why for name, forward in tried.items() if forward.why}


@dataclass
class _Tried:
    """A forward whose first call is traced; ``why`` it is no graph, if it is none."""

    plain: Callable[..., Any]
    plan: Compilation
    why: str = field(default="", init=False)
    called: bool = field(default=False, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        if self.called:
            return self.plain(*args, **kwargs)
        self.called = True
        traced = torch.compile(self.plain, backend="eager", fullgraph=True, dynamic=self.plan.dynamic)
        try:
            return traced(*args, **kwargs)
        except TorchDynamoException as error:
            self.why = cause(error)
        return self.plain(*args, **kwargs)
