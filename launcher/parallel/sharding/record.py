"""Records the operators that a stage runs on whole tensors, with ``torch.export``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.trace.model_facts import spec
from launcher.plan.sharding.op_graph import Arg, Name, OpGraph, OpNode, Ref, Value
from launcher.plan.sharding.overwrites import seen_elsewhere

KEY = "parallel.operators"


def record(module: nn.Module, inputs: Sequence[torch.Tensor]) -> OpGraph:
    """The forward of ``module`` (on the meta device) on ``inputs``. Raises ``RequestError``."""
    try:
        program = torch.export.export(copied(module), tuple(inputs), strict=False)
    except Exception as error:  # whatever the code of a model or torch's tracing raises
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        text = f"torch.export cannot follow the model, so its operators have no strategies: {line}"
        raise RequestError((Problem(KEY, text),)) from error
    graph = _Recorder(program, module).graph()
    written = seen_elsewhere(graph)
    return graph if not written else _of_values(program, module, written[0])


def _of_values(program: torch.export.ExportedProgram, module: nn.Module, written: OpNode) -> OpGraph:
    """The same with new tensors instead of writes into parts of others, which torch makes of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        program = program.run_decompositions({})
    if any(s.kind.name != "USER_OUTPUT" for s in program.graph_signature.output_specs):
        text = (
            f"{written.module or 'the model'} writes into a part of a tensor that is used as a whole "
            f"({written.op}), and the model has buffers that it writes into too"
        )
        cure = "make a new tensor of the parts, with torch.cat or torch.where"
        raise RequestError((Problem(KEY, text, cure),))
    return _Recorder(program, module).graph()


class _Recorder:
    """Turns an exported program into an ``OpGraph``."""

    def __init__(self, program: torch.export.ExportedProgram, module: nn.Module) -> None:
        self.program = program
        self.values: list[Value] = []
        self.at: dict[fx.Node, int] = {}
        self.parts: dict[fx.Node, tuple[int, ...]] = {}
        self.first = _first_names(module)

    def graph(self) -> OpGraph:
        signature = self.program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        inputs: list[int] = []
        params: dict[str, int] = {}
        nodes: list[OpNode] = []
        outputs: tuple[int, ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    params[self.first[names[node.name]]] = self._value(node, node.meta["val"])
                elif node.name in signature.user_inputs:
                    inputs.append(self._value(node, node.meta["val"]))
                else:
                    raise RequestError(
                        (Problem(KEY, f"the model makes a tensor of Python numbers, {node.name}"),)
                    )
            elif node.op == "output":
                kept = {s.arg.name for s in signature.output_specs if s.kind.name == "USER_OUTPUT"}
                outputs = tuple(self.at[n] for n in node.args[0] if n.name in kept)
            elif node.meta.get("val", node) is None:
                continue  # a check of dtype and device that tracing has put in: it makes nothing
            elif node.target is not _getitem:
                nodes.append(self._node(node))
            else:
                source, place = node.args
                self.at[node] = self.parts[source][place]
        return OpGraph(tuple(self.values), tuple(inputs), tuple(params.items()), tuple(nodes), outputs)

    def _node(self, node: fx.Node) -> OpNode:
        made = node.meta["val"]
        given = any(self.values[self.at[n]].trains for n in node.all_input_nodes if n in self.at)
        if isinstance(made, torch.Tensor):
            outs = (self._value(node, made, given),)
        else:
            outs = self.parts[node] = tuple(self._add(t, given) for t in made)
        return OpNode(
            op=node.target.name().removeprefix("aten::"),
            module=_module(node),
            args=tuple(self._arg(a) for a in node.args),
            kwargs=tuple((k, self._arg(v)) for k, v in node.kwargs.items()),
            outs=outs,
        )

    def _value(self, node: fx.Node, t: torch.Tensor, trains: bool | None = None) -> int:
        self.at[node] = self._add(t, t.requires_grad if trains is None else trains)
        return self.at[node]

    def _add(self, t: torch.Tensor, trains: bool) -> int:
        self.values.append(Value(spec(t), trains and t.dtype.is_floating_point))
        return len(self.values) - 1

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return Ref(self.at[arg])
        if isinstance(arg, list | tuple):
            return tuple(self._arg(a) for a in arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        return Name(str(arg))


def _getitem_of() -> Any:
    from operator import getitem

    return getitem


_getitem = _getitem_of()


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first of the names of each tensor."""
    first: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(t), name) for name, t in named}


def _module(node: fx.Node) -> str:
    """The path of the module whose code runs."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
