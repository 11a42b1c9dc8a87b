"""Checks whether the recording of a forward computes all that the forward does, including its backward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.parallel.dispatch.pytree import tree_leaves
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.python_state import PythonState, changed, held
from launcher.parallel.sharding.hidden_changes import HiddenChanges
from launcher.parallel.sharding.value_numbers import ValueNumbers
from launcher.parallel.trace.capture import stream

Numbers = dict[str, str | None]
"""A number for each output, gradient, and final parameter and buffer; ``None`` if it does not exist."""


def lost(module: nn.Module, program: torch.export.ExportedProgram, inputs: Sequence[Tensor]) -> str:
    """Return what ``program``, recorded of ``module`` for ``inputs`` (all on meta), fails to do, or ""."""
    # run the module twice, with its own code and that of its hooks
    model, trains = copied(module), module.training  # a copy of a graph forgets its mode
    named = dict(_tensors(model))
    before, streams = held(model), _streams()
    once, again = (_numbers(model, named, inputs, trains) for _ in range(2))
    if _streams() != streams:
        return "the forward seeds torch's random stream, or draws from Python's or numpy's"
    counts = _counts(before, held(model))
    if counts:
        return f"the forward or the backward changes {counts[0]} with every call"
    if _different(once, again):
        return "the forward does something else with every call"

    # run the recording once
    named = dict(_tensors(copied(module)))
    given = _arguments(program, named)
    found = _different(once, _numbers(_over(given, program.graph_module), named, inputs, trains))
    if found:
        return f"{found} is not that of its operators alone"
    if trains:
        changes = HiddenChanges(program.graph_module)
        _over(given, changes.run)(*inputs)
        for name in changes.found:
            return f"{name} changes a tensor in place where autograd does not see it"
    return ""


def _arguments(program: torch.export.ExportedProgram, named: dict[str, Tensor]) -> list[Tensor | None]:
    """Return the arguments of the program: tensors of the module, and ``None`` for an input."""
    signature = program.graph_signature
    places = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    takes = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    return [named[places[name]] if name in places else None for name in takes]


def _over(given: list[Tensor | None], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` as a function of the inputs."""

    def forward(*inputs: Tensor) -> Any:
        rest = iter(inputs)
        return run(*(next(rest) if t is None else t for t in given))

    return forward


def _counts(before: PythonState, after: PythonState) -> list[str]:
    """Return the attributes that have changed; a new tensor is not of the model and does not count."""
    return [key[0] for key in changed(before, after) if not isinstance(after.marks.get(key), Tensor)]


def _streams() -> tuple[Any, ...]:
    """Return the states of the random streams; on meta nothing is drawn from torch's."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), *rest, stream()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _numbers(
    forward: Callable[..., Any], named: dict[str, Tensor], inputs: Sequence[Tensor], trains: bool
) -> Numbers:
    """Number the results of one forward and, in training, of the backward of all its outputs."""
    # before
    given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    leaves = {**named, **{f"input {n}": x for n, x in enumerate(given)}}
    numbers = ValueNumbers()
    for name, t in leaves.items():
        t.grad = None
        numbers.name(t, name)

    # forward and backward
    with numbers, torch.set_grad_enabled(trains):
        outs = [t for t in tree_leaves(forward(*given)) if isinstance(t, Tensor)]
        out: Numbers = {f"output {n}": numbers.of(t) for n, t in enumerate(outs)}
        ways = [t for t in outs if trains and t.requires_grad]
        seeds = [torch.empty_like(t) for t in ways]
        for n, t in enumerate(seeds):
            numbers.name(t, f"gradient {n}")
        if ways:
            torch.autograd.backward(ways, seeds)

    # afterwards
    for name, t in leaves.items():
        out[f"the gradient of {name}"] = None if t.grad is None else numbers.of(t.grad)
        out[f"what becomes of {name}"] = numbers.of(t.detach())
    return out


def _different(a: Numbers, b: Numbers) -> str:
    """Return the first name whose numbers differ, or ""."""
    return next((name for name in (a | b) if a.get(name) != b.get(name)), "")
