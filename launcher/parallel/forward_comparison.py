"""Compares the forward that ranks will run with the model's own, on a few samples.

Two kinds of code would give other results on ranks:

- A trace runs the code between the modules under torch's dispatch modes and on meta tensors. Code that tests
  for either takes another branch in the trace, and the stages would run that branch.
- A recomputed module runs again after the rest of the forward. State that it reads may have another value
  then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor, nn

from launcher.errors import RequestError
from launcher.parallel.dispatch.containers import ConstantFunction
from launcher.parallel.dispatch.modes import default_dtype, tree_leaves
from launcher.parallel.model_state.module_globals import files_of, put_back
from launcher.parallel.model_state.python_state import PythonState, changed
from launcher.parallel.recompute import NotRecomputable, install
from launcher.parallel.stages import unsplit
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.trace.code_between_modules import RUNNING, Tracer, follow
from launcher.parallel.trace.mixing_samples import numbers_if_too_large
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.run_module import in_memory, trial_inputs
from launcher.parallel.trace.sample_values import trying
from launcher.plan.values.recomputed_module import Recomputed

SAMPLES = 2
STEPS = 2  # with recomputation: state that one step leaves may matter in the next
CLOSE = 1e-9
Change = Callable[[nn.Module], nn.Module]
"""Returns the module that runs in place of a model."""


def traced_difference(model: nn.Module, leaves: frozenset[str], inputs: Sequence[Tensor]) -> str:
    """Returns what the traced forward does differently from the model's own: a sentence without a subject.

    Returns "" if there is nothing, and also if the model is too large to run, is not deterministic, or fails
    on the sample values. ``inputs`` are on meta; their number of samples does not matter.
    """
    if not _comparable(model, inputs):
        return ""
    with _trial(model):
        tracer = follow(model, leaves, _samples(inputs))
        own = _own(model, inputs, 1)
        if own is None:
            return ""
        before = _state_of_constants(tracer)
        if what := _difference(own, model, inputs, 1, lambda m: unsplit(m, tracer)):
            why = "for example because it asks for torch's modes or for the type of a tensor"
            return f"computes something else while it is traced ({what}), {why}"
        for name, path in changed(before, _state_of_constants(tracer)):
            return f"passes on {name}, whose {path.lstrip('.')} changes: all forwards would share it"
    return ""


def _state_of_constants(tracer: Tracer) -> PythonState:
    """Returns the state of the objects that the traced code passes on, such as functions with closures.

    The trace has each of these objects once, but the model may make it in each forward.
    """
    out = PythonState(by_value=True)
    for node in tracer.graph.nodes:
        if isinstance(node.target, ConstantFunction):
            value = node.target.value
            out.enter(getattr(value, "__name__", type(value).__name__), value)
    return out


def not_repeatable(
    model: nn.Module, recomputed: Sequence[Recomputed], inputs: Sequence[Tensor]
) -> dict[str, str]:
    """Returns the ``recomputed`` modules that cannot be recomputed, and why.

    Recomputing them would fail in the second step, or give results that differ from the model's. ``inputs``
    are as for ``traced_difference``. If only several together make a difference, all are returned.
    """
    if not recomputed or not _comparable(model, inputs):
        return {}

    def wrong(own: dict[str, Tensor], some: Sequence[Recomputed]) -> str:
        def change(real: nn.Module) -> nn.Module:
            install(real, some, Axis(1))
            return real

        try:
            what = _difference(own, model, inputs, STEPS, change)
        except NotRecomputable as error:
            return error.why
        return f"its second forward computes something else than its first ({what})" if what else ""

    with _trial(model):
        own = _own(model, inputs, STEPS)
        if own is None or not (together := wrong(own, recomputed)):
            return {}
        each = {r.module: wrong(own, [r]) for r in recomputed}
        return {module: why for module, why in each.items() if why} or dict.fromkeys(each, together)
    return {}


def _comparable(model: nn.Module, inputs: Sequence[Tensor]) -> bool:
    return trying() and not numbers_if_too_large(model) and all(x.dim() for x in inputs)


@contextmanager
def _trial(model: nn.Module) -> Iterator[None]:
    """Enters the state in which ranks run a forward, and restores the process's own afterwards.

    Suppresses what the user's code raises for drawn values: other checks judge the forward.
    """
    around = torch.random.fork_rng(devices=[]), streams_kept(), put_back(files_of(model)), torch.enable_grad()
    with ExitStack() as stack, suppress(Exception, SystemExit):
        for each in around:
            stack.enter_context(each)
        yield


def _samples(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty((SAMPLES, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]


def _own(model: nn.Module, inputs: Sequence[Tensor], steps: int) -> dict[str, Tensor] | None:
    """Returns the model's own results; ``None`` if two equal runs differ."""
    own, again = (_results(model, inputs, steps, lambda m: m) for _ in range(2))
    return None if _first_difference(own, again) else own


def _difference(
    own: dict[str, Tensor], model: nn.Module, inputs: Sequence[Tensor], steps: int, change: Change
) -> str:
    try:
        other = _results(model, inputs, steps, change)
    except RequestError:
        raise
    except Exception as error:
        return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    name = _first_difference(own, other)
    return f"{name} differs" if name else ""


def _results(model: nn.Module, inputs: Sequence[Tensor], steps: int, change: Change) -> dict[str, Tensor]:
    """Returns the outputs of a changed copy of ``model`` in each step, and its sums of gradients."""
    out: dict[str, Tensor] = {}
    with put_back(files_of(model)), streams_kept(), default_dtype(RUNNING):  # draws depend on this dtype
        torch.manual_seed(1)
        real = in_memory(model).double()
        run = change(real)
        for step in range(steps):
            xs = [x.double() if x.is_floating_point() else x for x in trial_inputs(_samples(inputs), 0)]
            made = [t for t in tree_leaves(run(*xs)) if isinstance(t, Tensor)]
            after = f" of step {step + 1}" if step else ""
            out |= {f"output {n}{after}": t.detach().clone() for n, t in enumerate(made)}
            ends = [t for t in made if t.requires_grad]
            torch.autograd.backward(ends, [torch.linspace(1, 2, t.numel()).view(t.shape).to(t) for t in ends])
    grads = {name: p.grad for name, p in real.named_parameters() if p.grad is not None}
    return out | {f"the gradient of {name}": g for name, g in grads.items()}


def _first_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    for name in (*a, *b):
        if name not in a or name not in b or not _close(a[name], b[name]):
            return name
    return ""


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    return torch.allclose(a.to_dense(), b.to_dense(), rtol=CLOSE, atol=CLOSE, equal_nan=True)
