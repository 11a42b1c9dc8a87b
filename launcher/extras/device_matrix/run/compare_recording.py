"""Compares a recording with the forward that it records."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from launcher.parallel.dispatch.modes import Dispatch, tree_leaves, tree_map_only
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import files_of, put_back
from launcher.parallel.model_state.python_state import PythonState, changed, generator_state, snapshot
from launcher.parallel.trace.mixing_samples import numbers_if_too_large
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.run_module import in_memory, trial_inputs
from launcher.parallel.trace.sample_values import trying


class HiddenChanges(fx.Interpreter):
    """Runs the recording of a forward.

    ``operators`` are those that change, unseen by autograd, the memory of a tensor that has a gradient.
    A forward that is rebuilt without in-place changes would propagate a gradient there that the original does
    not.
    """

    def __init__(self, graphs: fx.GraphModule, outer: HiddenChanges | None = None) -> None:
        super().__init__(graphs, garbage_collect_values=False)
        self.operators: list[str] = outer.operators if outer else []
        self._lies: defaultdict[int, list[Tensor]] = outer._lies if outer else defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._lies[t.untyped_storage()._cdata].append(t)
        return out

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target) == "wrap_with_set_grad_enabled":
            enabled, region, *arguments = args
            with torch.set_grad_enabled(enabled):
                return HiddenChanges(region, self).run(*arguments)
        if isinstance(target, torch._ops.OpOverload):
            self._look(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _look(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for t in written(op, args, kwargs):
            beside = self._lies[t.untyped_storage()._cdata]
            sees = torch.is_grad_enabled() and t.requires_grad and op is not torch.ops.aten.detach_.default
            if not sees and any(other.requires_grad for other in beside):
                self.operators.append(op.overloadpacket.__name__)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation's schema marks as written."""
    out: list[Tensor] = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            out += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return out


COMMUTES = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
COPIES = (torch.ops.aten.clone.default, torch.ops.aten.lift_fresh.default)


class ValueNumbers(Dispatch):
    """While entered, numbers every result, and every changed tensor, of operations on meta tensors.

    A number depends on the operation, its constants and the numbers of its inputs; random draws are counted.
    A storage has a number, and a tensor's number depends on that of its storage and on its place there.
    Changing all of a tensor in place gives the same number as making a new one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: dict[int, str] = {}
        self._alive: list[Any] = []  # a freed address could be reused
        self._draws = 0

    def name(self, t: Tensor, text: str) -> None:
        """Gives the storage of ``t`` a number of its own."""
        self._put(t, _digest(text))

    def of(self, t: Tensor) -> str:
        """Returns the number of a value."""
        storage = t.untyped_storage()
        if storage._cdata not in self._memory:
            self._put(t, _digest("unknown", len(self._memory)))
        lies = (t.dtype, t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.is_conj(), t.is_neg())
        return _digest(self._memory[storage._cdata], *lies)

    def _put(self, t: Tensor, number: str) -> None:
        storage = t.untyped_storage()
        if storage._cdata not in self._memory:
            self._alive.append(storage)
        self._memory[storage._cdata] = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # before it runs: the numbers of its inputs
        kwargs = dict(kwargs or {})
        taken = [self._numbered(a) for a in args]
        if func in COMMUTES and len(args) == 2 and not kwargs:
            taken.sort()
        named = sorted((name, self._numbered(a)) for name, a in kwargs.items())
        draw = self._drawn(func)
        call_digest = _digest(func.overloadpacket.__name__.removesuffix("_"), taken, named, draw)

        out = func(*args, **kwargs)

        # the changed tensors, and the new ones
        changed = written(func, args, kwargs)
        for n, t in enumerate(changed):
            storage = self._memory.get(t.untyped_storage()._cdata, "")
            lies = (t.storage_offset(), tuple(t.shape), tuple(t.stride()))
            self._put(t, _digest(call_digest, n) if _fills(t) else _digest(storage, *lies, call_digest, n))
        for n, t in enumerate(x for x in tree_leaves(out) if isinstance(x, Tensor)):
            if t.untyped_storage()._cdata not in self._memory:
                self._put(t, self._made(func, args, t) or _digest(call_digest, n))
        return out

    def _made(self, func: Any, args: Sequence[Any], made: Tensor) -> str:
        """Returns the number of a full tensor for a copy of it, or ""."""
        if func not in COPIES or not (_fills(made) and _fills(args[0])) or made.stride() != args[0].stride():
            return ""
        return self._memory.get(args[0].untyped_storage()._cdata, "")

    def _drawn(self, func: Any) -> str:
        """Returns a digest of the draw's number and of torch's stream, which meta tensors do not advance."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return ""
        self._draws += 1
        return _digest(self._draws, generator_state(torch.default_generator))

    def _numbered(self, arg: Any) -> str:
        if isinstance(arg, Tensor):
            return self.of(arg)
        if isinstance(arg, list | tuple):
            return f"[{','.join(map(self._numbered, arg))}]"
        return "generator" if isinstance(arg, torch.Generator) else repr(arg)


def _fills(t: Tensor) -> bool:
    """Returns true if ``t`` covers its storage, in order."""
    return t.is_contiguous() and t.numel() * t.itemsize == t.untyped_storage().nbytes()


def _digest(*parts: Any) -> str:
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


Numbers = dict[str, str | None]
"""A number for each output, gradient, and final parameter and buffer; ``None`` if it does not exist."""


def lost(module: nn.Module, program: torch.export.ExportedProgram, inputs: Sequence[Tensor]) -> str:
    """Returns what ``program``, a recording of ``module`` on ``inputs`` (on meta), fails to do, or ""."""
    # run the module twice, with its own code and that of its hooks
    model, trains = copied(module), module.training  # a copy of a graph forgets its mode
    named = dict(_tensors(model))
    before, streams = snapshot(model), _streams()
    once, again = (_numbers(model, named, inputs, trains) for _ in range(2))
    if _streams() != streams:
        return "the forward seeds torch's random stream, or draws from Python's or numpy's"
    counts = _counts(before, snapshot(model))
    if counts:
        return f"the forward or the backward changes {counts[0]} with every call"
    if _different(once, again):
        return "the forward differs from call to call"

    # run the recording once
    named = dict(_tensors(copied(module)))
    arguments = _arguments(program, named)
    difference = _different(once, _numbers(_over(arguments, program.graph_module), named, inputs, trains))
    if difference:
        return f"{difference} differs from the result of its operators alone"
    if trains:
        changes = HiddenChanges(program.graph_module)
        _over(arguments, changes.run)(*inputs)
        for name in changes.operators:
            return f"{name} changes a tensor in place where autograd does not see it"
    return _other_values(module, program, inputs)


CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How far results of equal operators may differ, relative to the largest: other kernels may run."""


def _other_values(module: nn.Module, program: torch.export.ExportedProgram, inputs: Sequence[Tensor]) -> str:
    """Returns the output that the recording computes otherwise than the module on values in memory, or "".

    The recording was made on meta, where code that asks for the device or the values of a tensor may take
    another path. Nothing is compared for a module that is too large to run, that draws random numbers, or
    that fails for the values tried.
    """
    draws = (torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in program.graph.nodes)
    if not trying() or numbers_if_too_large(module) or any(draws):
        return ""
    outputs: list[list[Tensor]] = []
    with (
        suppress(Exception, SystemExit),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        streams_kept(),
        put_back(files_of(module)),
    ):
        for recorded in (False, True):
            real = in_memory(module)
            run: Callable[..., Any] = real
            if recorded:
                run = _over(_arguments(program, dict(_tensors(real))), OnCpu(program.graph_module).run)
            with torch.no_grad():
                made = tree_leaves(run(*trial_inputs(inputs, 0)))
            outputs.append([t for t in made if isinstance(t, Tensor)])
    if len(outputs) < 2:
        return ""
    own, other = outputs
    if len(own) != len(other):
        return "the number of outputs differs from that of its operators alone"
    for n, (a, b) in enumerate(zip(own, other, strict=True)):
        if not _close(a, b):
            return f"output {n} differs from the result of its operators alone"
    return ""


class OnCpu(fx.Interpreter):
    """Runs a recording that was made on meta tensors on tensors in memory."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return super().call_function(target, args, kwargs)


def _close(own: Tensor, other: Tensor) -> bool:
    if own.shape != other.shape or own.dtype != other.dtype:
        return False
    if own.is_complex():
        return _close(torch.view_as_real(own.resolve_conj()), torch.view_as_real(other.resolve_conj()))
    if not own.is_floating_point():
        return torch.equal(own, other)
    size = float(own.abs().nan_to_num().max()) if own.numel() else 0.0
    allowed = size * CLOSE.get(own.dtype, 5e-2)
    return torch.allclose(own, other, rtol=0, atol=allowed, equal_nan=True)


def _arguments(program: torch.export.ExportedProgram, named: dict[str, Tensor]) -> list[Tensor | None]:
    """Returns the arguments of the program: tensors of the module, and ``None`` for an input."""
    signature = program.graph_signature
    places = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    takes = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    return [named[places[name]] if name in places else None for name in takes]


def _over(arguments: list[Tensor | None], run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``run`` as a function of the inputs."""

    def forward(*inputs: Tensor) -> Any:
        rest = iter(inputs)
        return run(*(next(rest) if t is None else t for t in arguments))

    return forward


def _counts(before: PythonState, after: PythonState) -> list[str]:
    """Returns the attributes that have changed; new tensors do not count."""
    return [key[0] for key in changed(before, after) if not isinstance(after.marks.get(key), Tensor)]


def _streams() -> tuple[Any, ...]:
    """Returns the states of the random streams; on meta nothing is drawn from torch's."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), *rest, generator_state(torch.default_generator)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _numbers(
    forward: Callable[..., Any], named: dict[str, Tensor], inputs: Sequence[Tensor], trains: bool
) -> Numbers:
    """Numbers the results of one forward and, in training, of the backward of all its outputs."""
    # before
    copies = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    leaves = {**named, **{f"input {n}": x for n, x in enumerate(copies)}}
    numbers = ValueNumbers()
    for name, t in leaves.items():
        t.grad = None
        numbers.name(t, name)

    # forward and backward
    with numbers, torch.set_grad_enabled(trains):
        outs = [t for t in tree_leaves(forward(*copies)) if isinstance(t, Tensor)]
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
        out[f"the final value of {name}"] = numbers.of(t.detach())
    return out


def _different(a: Numbers, b: Numbers) -> str:
    """Returns the first name whose numbers differ, or ""."""
    return next((name for name in (a | b) if a.get(name) != b.get(name)), "")
