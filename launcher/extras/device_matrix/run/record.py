"""Records a stage with torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.random import fork_rng

from launcher.errors import Problem, RequestError, refuse
from launcher.extras.device_matrix.op_graph import Arg, Name, OpGraph, OpNode, Ref, Value
from launcher.extras.device_matrix.run.compare_recording import lost
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.dispatch.user_lines import of_error
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.trace.code_between_modules import LOOKS, RUNNING, failing
from launcher.parallel.trace.run_module import needs_values
from launcher.parallel.trace.tensor_specs import spec
from launcher.user_errors import user_error


def settle_regions(graphs: torch.nn.Module, key: str) -> bool:
    """Detaches tensors that enter ``no_grad`` regions, in place; returns true if a region must be unfolded.

    Unfolding by torch forgets the mode of an operator. Raises ``RequestError`` for regions under autocast,
    whose dtypes would be lost.
    """
    unfold = False
    for module in graphs.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if str(node.target) == "wrap_with_autocast":
                unfold = True
                _refuse(node, key)
            if str(node.target) == "wrap_with_set_grad_enabled":
                unfold = True
                if node.args[0] is False:
                    _cut(module.graph, node)
        module.recompile()
    return unfold


def _refuse(node: fx.Node, key: str) -> None:
    """Refuses an enabled autocast; the node's arguments are device, dtype, enabled and so on."""
    if node.args[2]:
        text = "the forward computes under torch.autocast, whose dtypes would be lost; cast with .to instead"
        raise RequestError((Problem(key, text),))


def _cut(graph: fx.Graph, region: fx.Node) -> None:
    """Detaches each tensor that enters ``region``; in-place changes there have no gradient either."""
    detached: dict[fx.Node, fx.Node] = {}
    for entering in region.all_input_nodes:
        if isinstance(entering.meta.get("val"), torch.Tensor):
            with graph.inserting_before(region):
                detached[entering] = graph.call_function(torch.ops.aten.detach.default, (entering,))
            detached[entering].meta = dict(entering.meta)
    for entering, without in detached.items():
        region.replace_input_with(entering, without)


KEY = "parallel.operators"
OTHERWISE = (
    "leave parallel.mode and strategies over device matrices out: stages, hsdp and one axis tp run the "
    "model's own code"
)


def record(module: nn.Module, inputs: Sequence[torch.Tensor], *, ours: bool = False) -> OpGraph:
    """Records the forward of ``module`` (on the meta device) on ``inputs``, in its present mode.

    ``ours`` marks a model of this package, of which a recording loses nothing. Raises ``RequestError``.
    """
    traced = copied(module)
    try:
        with default_dtype(RUNNING), torch.device("meta"), fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about itself
            with redirect_stderr(StringIO()):  # torch prints the graph where the forward reads data
                program = torch.export.export(traced, tuple(inputs), strict=False)
            why = "" if ours else lost(module, program, inputs)
            refuse([_cannot(f"the model does more than operators do: {why}")] if why else [])
            if settle_regions(program.graph_module, KEY) or any(_changes(n) for n in program.graph.nodes):
                program = program.run_decompositions({})  # the same without changes in place
    except RequestError:
        raise
    except Exception as error:  # from the code of a model, or torch's tracing
        at = failing(traced, error)
        reads = needs_values(error) or "data-dependent" in str(error)
        why = f"{LOOKS} ({of_error(error)})" if reads else user_error(error)
        text = f"torch.export cannot follow {at or type(module).__name__}: {why}"
        raise RequestError((_cannot(text),)) from error
    _refuse_hidden_changes(program)
    return _Recorder(program, module).graph()


def _cannot(text: str) -> Problem:
    return Problem(KEY, f"{text}; {OTHERWISE}")


def _refuse_hidden_changes(program: torch.export.ExportedProgram) -> None:
    """Refuses instance norms that update running statistics, which tracing does not record as values."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.instance_norm.default and _changes(node):
            where = _module(node) or "the model"
            text = f"{where}: instance norm that updates running statistics has no rule over device matrices"
            raise RequestError((Problem(KEY, f"{text}; set track_running_stats=False, or {OTHERWISE}"),))


class _Recorder:
    """Turns an exported program into an ``OpGraph``."""

    def __init__(self, program: torch.export.ExportedProgram, module: nn.Module) -> None:
        self.program = program
        self.values: list[Value] = []
        self.at: dict[fx.Node, int] = {}
        self.parts: dict[fx.Node, tuple[int, ...]] = {}
        self.first = _first_names(module)
        self.buffers = {self.first[n] for n, _ in module.named_buffers(remove_duplicate=False)}

    def graph(self) -> OpGraph:
        signature = self.program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        inputs: list[int] = []
        params: dict[str, int] = {}
        nodes: list[OpNode] = []
        outputs: tuple[int, ...] = ()
        changes: dict[str, int] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    first = self.first[names[node.name]]
                    if first not in params:
                        params[first] = self._value(node, node.meta["val"])
                    self.at[node] = params[first]
                elif node.name in signature.user_inputs:
                    inputs.append(self._value(node, node.meta["val"]))
                else:
                    text = f"the forward uses a tensor that is not its own, {node.name}"
                    raise RequestError((_cannot(text),))
            elif node.op == "output":
                outputs, changes = self._leaving(node)
            elif "_assert_" in str(node.target) or (node.meta.get("val", node) is None and not node.users):
                continue  # a check of dtype and device by tracing, or a dtype, known by now
            elif node.target is not getitem:
                nodes.append(self._node(node))
            else:
                source, place = node.args
                self.at[node] = self.parts[source][place]
        return OpGraph(
            values=tuple(self.values),
            inputs=tuple(inputs),
            params=tuple(params.items()),
            nodes=tuple(nodes),
            outputs=outputs,
            buffers=frozenset(self.buffers & params.keys()),
            changes=tuple(changes.items()),
        )

    def _leaving(self, node: fx.Node) -> tuple[tuple[int, ...], dict[str, int]]:
        """Returns the outputs, and the new values of buffers."""
        outputs, changes = [], {}
        made_here: Any = node.args[0]
        for output_spec, made in zip(self.program.graph_signature.output_specs, made_here, strict=True):
            if output_spec.kind.name == "USER_OUTPUT":
                outputs.append(self.at[made])
            elif output_spec.kind.name == "BUFFER_MUTATION":
                changes[self.first[output_spec.target]] = self.at[made]
            else:
                text = f"the forward changes {output_spec.target}, which is not a buffer of the model"
                raise RequestError((_cannot(text),))
        return tuple(outputs), changes

    def _node(self, node: fx.Node) -> OpNode:
        made = node.meta["val"]
        needs_grad = node.target is not torch.ops.aten.detach.default and any(
            self.values[self.at[n]].trains for n in node.all_input_nodes if n in self.at
        )
        if isinstance(made, torch.Tensor):
            outs: tuple[int, ...] = (self._value(node, made, needs_grad),)
        else:
            outs = self.parts[node] = tuple(self._add(t, needs_grad) for t in made)
        if not isinstance(node.target, torch._ops.OpOverload):
            called = getattr(node.target, "__name__", str(node.target))
            where = _module(node) or "the model's own forward"
            raise RequestError((_cannot(f"{where} calls {called}, which is not an operator on tensors"),))
        name = node.target.name().removeprefix("aten::")
        if needs_grad and name.endswith("_scatter") and isinstance(made, torch.Tensor) and made.is_complex():
            where = _module(node) or "the model's own forward"
            text = f"{where} changes a part of a complex tensor in place; a recording calls {name} instead"
            raise RequestError((_cannot(f"{text}, which torch cannot differentiate for complex numbers"),))
        return OpNode(
            op=name,
            module=_module(node),
            args=tuple(self._arg(a) for a in node.args),
            kwargs=tuple((k, self._arg(v)) for k, v in node.kwargs.items()),
            outs=outs,
        )

    def _value(self, node: fx.Node, t: torch.Tensor, trains: bool | None = None) -> int:
        self.at[node] = self._add(t, t.requires_grad if trains is None else trains)
        return self.at[node]

    def _add(self, t: torch.Tensor, trains: bool) -> int:
        strides = () if t.is_contiguous() else tuple(t.stride())
        self.values.append(Value(spec(t), trains and (t.is_floating_point() or t.is_complex()), strides))
        return len(self.values) - 1

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return Ref(self.at[arg])
        if isinstance(arg, list | tuple):
            return tuple(self._arg(a) for a in arg)
        if arg is None or isinstance(arg, bool | int | float | complex | str):
            return arg
        return Name(str(arg))


def _changes(node: fx.Node) -> bool:
    """Returns true if ``node`` changes a tensor in place.

    Norms with running statistics do, although their schema does not say so.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        return node.args[3] is not None and node.args[5] is True
    return node.target._schema.is_mutable


def _first_names(module: nn.Module) -> dict[str, str]:
    """Returns the first name of the tensor for each of its names."""
    first: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(t), name) for name, t in named}


def _module(node: fx.Node) -> str:
    """Returns the path of the module whose code runs."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
