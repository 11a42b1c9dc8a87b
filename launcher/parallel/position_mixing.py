"""Finds the modules that mix the positions of a sequence: they cannot run a sequence in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from launcher.errors import Problem
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.trace import tensor_specs
from launcher.parallel.trace.code_between_modules import RUNNING, refusing
from launcher.parallel.trace.run_module import run_module
from launcher.plan.values.tensor_spec import TensorSpec

Kept = tuple[Tensor, ...]


@runtime_checkable
class Pieced(Protocol):
    """A module that can run a sequence in pieces."""

    def forward(self, *inputs: Any) -> Any: ...
    def piece(self, *inputs: Any, start: int, past: Sequence[Kept]) -> tuple[Tensor, Kept]: ...


KEY = "parallel.pipeline.seq_chunks"

ALIKE = (
    nn.Embedding,
    nn.Linear,
    nn.Identity,
    nn.Dropout,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
)
"""Modules whose forward treats every position in the same way."""
NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Modules whose forward treats every position in the same way if they normalize the last dim only."""

ALIKE_FUNCTIONS = frozenset({
    "abs", "add", "clamp", "clone", "contiguous", "detach", "div", "dropout", "embedding", "erf", "exp",
    "float", "gelu", "linear", "log", "mul", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "rtruediv",
    "sigmoid", "silu", "softplus", "sqrt", "square", "sub", "tanh", "to", "truediv", "type_as", "dim", "get",
    "size", "radd", "rmul", "iadd", "imul", "isub",
})  # fmt: skip
"""Functions, by name without underscores, whose result at one position depends on that position alone."""


def mixing(model: nn.Module, specs: Sequence[TensorSpec]) -> list[Problem]:
    """Returns a problem for each module that cannot run in pieces.

    Such a module may mix positions and has no ``piece``, or it has one and runs several times in a forward.
    """
    model = copied(model)
    watch = _PositionMixing()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(watch.enter(name, module), with_kwargs=True)
        module.register_forward_hook(watch.leave, always_call=True)

    # one forward of full sequences
    xs = tensor_specs.meta(specs)
    with refusing(model, xs), default_dtype(RUNNING), torch.device("meta"), watch:
        run_module(model, xs, {})

    # the functions that it called, and how often modules ran
    problems = []
    for name, function in watch.by_module.items():
        lacks = f"{_named(name, model)} calls {function}, which may mix positions, and has no method 'piece'"
        cure = f"give it one, set positionwise = True in it, or set {KEY}=1"
        problems.append(Problem("model", f"{lacks} to run a sequence in pieces; {cure}", f"{KEY}=1"))
    for name, n in watch.runs.items():
        if n > 1:
            text = f"{_named(name, model)} runs {n} times in one forward; the state of its pieces would mix"
            problems.append(Problem("model", text, f"{KEY}=1"))
    return problems


def _named(name: str, model: nn.Module) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else f"the forward of {kind}"


class _PositionMixing(TorchFunctionMode):
    """Notes functions that are called outside of modules that are known to be position-wise."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[tuple[str, bool]] = []
        self.by_module: dict[str, str] = {}
        self.runs: Counter[str] = Counter()

    def enter(self, name: str, module: nn.Module) -> Any:
        def note(*_: Any) -> None:
            if isinstance(module, Pieced):
                self.runs[name] += 1
            fine = isinstance(module, Pieced) or getattr(module, "positionwise", False) or _alike(module)
            self.inside.append((name, fine or (bool(self.inside) and self.inside[-1][1])))

        return note

    def leave(self, *_: Any) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside and not self.inside[-1][1] and func.__name__.strip("_") not in ALIKE_FUNCTIONS:
            self.by_module.setdefault(self.inside[-1][0], func.__name__)
        return func(*args, **(kwargs or {}))


def _alike(module: nn.Module) -> bool:
    forward = type(module).forward
    if any(forward is kind.forward for kind in NORMS):
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    return any(forward is kind.forward for kind in ALIKE)
