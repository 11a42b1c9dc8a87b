"""Finds state that passes between forwards, or to a backward, outside of parameters and buffers."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError
from launcher.parallel.dispatch.containers import mapped, tensors
from launcher.parallel.dispatch.modes import default_dtype, tree_leaves
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.module_globals import contents_put_back, files_of, put_back, variables
from launcher.parallel.model_state.python_state import PythonState, changed, owns_generator, reading, snapshot
from launcher.parallel.model_state.reachable_code import hooks_backward
from launcher.parallel.model_state.state_across_passes import BACKWARD, FORWARD, entangled
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.run_module import OTHER, in_memory, sample_inputs, trial_inputs
from launcher.parallel.trace.sample_values import FEW, SampleValues
from launcher.plan.values.model_graph import MovingAttribute

ROUNDS = 3
"""Number of forwards: the first fills caches, and the second may end a warm-up."""


def moving(model: nn.Module, inputs: Sequence[Tensor], looks: bool) -> tuple[MovingAttribute, ...]:
    """Returns the state that passes between forwards, and whether each item depends on the data.

    The state is in attributes of modules and in variables of their files. ``model`` is not changed.
    ``looks``: the model's Python code reads values of tensors. Such a model, or one with its own generator,
    can run only in memory, and variables are compared only there. Nothing is found where a model is too large
    for that, or fails for the values tried.
    """
    small = sum(t.numel() for t in (*model.parameters(), *model.buffers())) <= FEW
    looks = looks or owns_generator(model)
    out: tuple[MovingAttribute, ...] = ()
    with suppress(Exception), torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        out += _attributes(model, inputs, looks) if small or not looks else ()
    with suppress(Exception), torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        out += _variables(model, inputs) if small else ()
    return out


def moved_by_backwards(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[MovingAttribute, ...]:
    """Returns the state that a backward, but no forward, changes, and on which later results depend.

    The state is in attributes of modules and in variables of their files. The same inputs then give another
    output or gradient. ``model`` is not changed. Nothing is found for a model that is too large to run in
    memory, or that fails.
    """
    small = sum(t.numel() for t in (*model.parameters(), *model.buffers())) <= FEW
    if not small or not any(map(hooks_backward, model.modules())):
        return ()
    names = files_of(model)

    def after(batch: int) -> tuple[list[Any], list[Any], dict[str, None], PythonState]:
        """Returns the results of two passes, the places that only their backwards change, and the state."""
        with put_back(names), contents_put_back(model):
            one, xs = _ready(model, inputs, True, batch, parameter_hooks=True)
            torch.manual_seed(0)
            with torch.no_grad():
                for p in one.parameters():
                    if p.is_floating_point() and not p.any():  # zeros would hide a gradient
                        p.uniform_(0.1, 1)
            _pass(one, xs)  # to fill caches
            before = [snapshot(one), variables(names)]
            first, second = _pass(one, xs), _pass(one, xs)
            middle = [snapshot(one), variables(names)]
            for _ in range(2):
                _forward(one, xs, True)
            last = [snapshot(one), variables(names)]
            by_passes, by_forwards = (
                dict.fromkeys(name for a, b in zip(*two, strict=True) for name, _ in changed(a, b))
                for two in ((before, middle), (middle, last))
            )
            only = {n: None for n in by_passes if n not in by_forwards and not _tensor(one, n)}
            return first, second, only, middle[0]

    with suppress(Exception), torch.random.fork_rng(devices=[]), streams_kept(), default_dtype(torch.float32):
        first, second, moved, state = after(0)
        if not moved or _same(first, second):
            return ()
        differ = {name for name, _ in changed(state, after(OTHER)[3])}
        return tuple(MovingAttribute(name, name in differ, "backward") for name in moved)
    return ()


def _pass(model: nn.Module, xs: Sequence[Tensor]) -> list[Any]:
    """Returns the outputs and the gradients of a forward and a backward, always with the same draws."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model.zero_grad()
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x.clone() for x in xs]
    made = [t for t in tree_leaves(model(*leaves)) if isinstance(t, Tensor)]
    out = [t for t in made if t.requires_grad]
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    learning = (*leaves, *model.parameters())
    return [*(t.detach().clone() for t in made), *(t.grad.clone() for t in learning if t.grad is not None)]


def _attributes(model: nn.Module, inputs: Sequence[Tensor], looks: bool) -> tuple[MovingAttribute, ...]:
    # state after the first forward, and after more
    one, xs = _ready(model, inputs, looks, 0)
    run = partial(_forward, one, xs, looks)
    run()
    before = snapshot(one)
    for _ in range(ROUNDS - 1):
        run()
    names = dict.fromkeys(name for name, _ in changed(before, snapshot(one)) if not _tensor(one, name))
    if not names:
        return ()

    # which of it is read, and which depends on the data; reads of a tensor's attributes are not seen
    modules = dict(one.named_modules())
    read = dict.fromkeys(name for name in names if name.rpartition(".")[0] not in modules)
    with reading(one, names, lambda name: read.setdefault(name)):
        run()
    by_data: set[str] = set()
    if looks:
        by_data = {name for name, _ in changed(_after(model, inputs, 0), _after(model, inputs, OTHER))}
    return tuple(MovingAttribute(name, name in by_data) for name in names if name in read)


def _variables(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[MovingAttribute, ...]:
    """Returns the variables and class attributes of the model's files that one forward leaves to a later one.

    Because of these, a new copy of the model returns other results for the same inputs.
    """
    names = files_of(model)

    def after(batch: int) -> tuple[list[Any], PythonState]:
        one, xs = _ready(model, inputs, True, batch)
        return tree_leaves(_forward(one, xs, True)), variables(names)

    with put_back(names):
        after(0)  # to fill caches
        first, before = after(0)
        second, later = after(0)
        moved = dict.fromkeys(name for name, _ in changed(before, later))
        pairs = zip(first, second, strict=True)
        if not moved or all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor)):
            return ()
    by_data = []
    for batch in (0, OTHER):
        with put_back(names):
            by_data.append(after(batch)[1])
    differ = {name for name, _ in changed(*by_data)}
    return tuple(MovingAttribute(name, name in differ) for name in moved)


def drifting(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[str, ...]:
    """Returns attributes and variables that each forward changes, if the output of the next depends on them.

    The same inputs then give another result. ``model`` is not changed. Nothing is found for a model that is
    too large to run in memory, or that fails.
    """
    if sum(t.numel() for t in (*model.parameters(), *model.buffers())) > FEW:
        return ()
    names = files_of(model)
    with (
        suppress(Exception),
        torch.random.fork_rng(devices=[]),
        default_dtype(torch.float32),
        put_back(names),
    ):
        one, xs = _ready(model, inputs, True, 0)
        _forward(one, xs, True)  # to fill caches
        before = snapshot(one), variables(names)
        first, second = (tree_leaves(_forward(one, xs, True)) for _ in range(2))
        pairs = zip(first, second, strict=True)
        if all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor)):
            return ()
        after = snapshot(one), variables(names)
        moved = (name for a, b in zip(before, after, strict=True) for name, _ in changed(a, b))
        return tuple(dict.fromkeys(name for name in moved if not _tensor(one, name)))
    return ()


def not_restored(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[str, ...]:
    """Returns attributes that make a resumed model compute something else than a model that continues.

    The continuing model has run a forward, and its weights have changed since. The resumed model is new, with
    the tensors that a checkpoint stores. ``("",)`` is a difference that no attribute shows, such as a hook
    that a forward removes. ``model`` is not changed. Nothing is found for a model that is too large to run in
    memory, or that fails.
    """
    if sum(t.numel() for t in (*model.parameters(), *model.buffers())) > FEW:
        return ()
    names = files_of(model)
    kept = torch.random.fork_rng(devices=[]), streams_kept(), put_back(names)
    with suppress(Exception), kept[0], kept[1], kept[2], default_dtype(torch.float32):
        used, xs = _ready(model, inputs, True, 0)
        _forward(used, xs, True)
        with torch.no_grad():
            for p in used.parameters():
                p.mul_(0.75)
        others = trial_inputs(inputs, OTHER)
        resumed, again = (_restored(_ready(model, inputs, True, 0)[0], used) for _ in range(2))
        goes_on, *new = (_seeded_forward(one, others) for one in (used, resumed, again))
        if not _same(*new) or _same(goes_on, new[0]):
            return ()
        differ = dict.fromkeys(name for name, _ in changed(snapshot(resumed), snapshot(used)))
        return tuple(n for n in differ if not _tensor(used, n)) or ("",)
    return ()


def _restored(one: nn.Module, used: nn.Module) -> nn.Module:
    """Copies to ``one`` the tensors and extra state that a checkpoint stores of ``used``, and returns it."""
    mine = dict(one.named_modules())
    with torch.no_grad():
        for path, module in used.named_modules():
            passing = module._non_persistent_buffers_set
            for name, t in (*module._parameters.items(), *module._buffers.items()):
                there = mine[path]._parameters.get(name, mine[path]._buffers.get(name))
                if t is not None and name not in passing and isinstance(there, Tensor):
                    there.copy_(t)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                mine[path].set_extra_state(copy.deepcopy(module.get_extra_state()))
    return one


def _seeded_forward(one: nn.Module, xs: Sequence[Tensor]) -> list[Any]:
    random.seed(0)
    np.random.seed(0)
    return tree_leaves(_forward(one, xs, True))


def _same(a: list[Any], b: list[Any]) -> bool:
    """Returns true if all tensors of two results are equal."""
    return len(a) == len(b) and all(
        torch.equal(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, Tensor)
    )


def _after(model: nn.Module, inputs: Sequence[Tensor], batch: int) -> PythonState:
    """Returns the state after a first forward."""
    one, xs = _ready(model, inputs, True, batch)
    _forward(one, xs, True)
    return snapshot(one)


def _ready(
    model: nn.Module, inputs: Sequence[Tensor], looks: bool, batch: int, parameter_hooks: bool = False
) -> tuple[nn.Module, list[Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if looks:
            return in_memory(model, parameter_hooks=parameter_hooks), trial_inputs(inputs, batch)
    return copied(model), [torch.empty_like(x, device="meta") for x in inputs]


def _forward(model: nn.Module, xs: Sequence[Tensor], looks: bool) -> Any:
    torch.manual_seed(0)
    with torch.no_grad(), torch.device("cpu" if looks else "meta"):
        return model(*(x.clone() for x in xs))


def _tensor(model: nn.Module, name: str) -> bool:
    """Returns true if ``name`` is that of a parameter or buffer, which other checks cover."""
    path, _, attr = name.rpartition(".")
    with suppress(AttributeError):
        owner = model.get_submodule(path)
        return attr in owner._buffers or attr in owner._parameters
    return False


def unentangled(model: nn.Module, calls: Mapping[str, tuple[Any, Any]], values: SampleValues) -> None:
    """Refuses modules whose backward and other forwards affect each other.

    ``calls`` has the arguments of each call by the module's name. ``model`` is the original, because copies
    lack the hooks of its parameters.
    """
    for name, (args, kwargs) in calls.items():
        leaf = model.get_submodule(name)
        if sum(t.numel() for t in (*leaf.parameters(), *leaf.buffers())) > FEW:
            continue
        inputs = tensors((args, kwargs))

        def batch(at: int, call: Any = (args, kwargs), inputs: Any = inputs) -> Any:
            known = {id(t): v for t, v in zip(inputs, sample_inputs(inputs, at, values), strict=True)}
            return mapped(call, lambda t: known[id(t)])

        def ready(leaf: nn.Module = leaf, name: str = name, batch: Any = batch) -> Any:
            return in_memory(leaf, name, parameter_hooks=True), batch(0), batch(OTHER)

        with default_dtype(torch.float32):
            part = entangled(leaf, ready)
        if part:
            raise RequestError((Problem("model", f"{ENTANGLED[part].format(name)}"),))


ENTANGLED = {
    BACKWARD: (
        "the backward of {} uses state that the last forward left behind, but a "
        "pipeline runs other forwards in between; keep that state with the call (ctx, "
        "or an argument of the hook's function)"
    ),
    FORWARD: (
        "the backward of {} changes state that the next forward uses, but a pipeline "
        "runs both in another order than one process; change the state in the forward"
    ),
}
