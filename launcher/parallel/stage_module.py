"""A stage as a module: the user's own modules under their own names, and the code between them as its forward."""

from __future__ import annotations

import re
from functools import reduce
from keyword import iskeyword
from typing import Any

from torch import fx, nn


class StageModule(nn.Module):
    """What a stage has of a model. Unlike ``fx.GraphModule`` it leaves all names to the model."""


def assembled(model: nn.Module, graph: fx.Graph, index: int) -> nn.Module:
    """Stage ``index`` of ``model``: runs ``graph``, with the modules, parameters and buffers that it names."""
    graph.on_generate_code(lambda _: lambda lines: [_speakable(graph, line) for line in lines])
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<stage {index}>", "exec"), names)
    module: nn.Module = type(f"Stage{index}", (StageModule,), {"forward": names["forward"]})()
    module.training = model.training
    for path in sorted(_named(graph), key=lambda p: p.count(".")):  # what is around comes before what is inside
        _hang(model, module, path)
    return module


def _named(graph: fx.Graph) -> list[str]:
    """What it names of the model, in the graph's order: each rank gathers its modules in the order they hang in."""
    return list(dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")))


def _hang(model: nn.Module, stage: nn.Module, path: str) -> None:
    """Give ``stage`` what ``model`` has at ``path``, below bare modules where it lacks those around it."""
    *around, name = path.split(".")
    for part in around:
        if not hasattr(stage, part):
            stage.add_module(part, nn.Module())
        model, stage = getattr(model, part), getattr(stage, part)
    if hasattr(stage, name):
        return
    value = getattr(model, name)
    if name in model._buffers:
        stage.register_buffer(name, value, persistent=name not in model._non_persistent_buffers_set)
    else:
        setattr(stage, name, value)


def _speakable(graph: fx.Graph, code: str) -> str:
    """``self.net.in`` as ``getattr(getattr(self, 'net'), 'in')``: fx writes names that are keywords as they are."""
    for target in _named(graph):
        parts = target.split(".")
        if any(map(iskeyword, parts)):
            spoken = reduce(lambda r, e: f"{r}.{e}" if e.isidentifier() else f'getattr({r}, "{e}")', parts, "self")
            safe = reduce(lambda r, e: f"getattr({r}, {e!r})", parts, "self")
            code = safe.join(re.split(rf"{re.escape(spoken)}\b", code))
    return code
