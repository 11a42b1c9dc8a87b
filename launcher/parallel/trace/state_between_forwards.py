"""Finds state that passes between forwards, or to a backward, outside of parameters and buffers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
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
from launcher.parallel.model_state.python_state import (
    Key,
    PythonState,
    changed,
    owns_generator,
    reading,
    snapshot,
)
from launcher.parallel.model_state.reachable_code import hooks_backward
from launcher.parallel.model_state.state_across_passes import BACKWARD, FORWARD, entangled
from launcher.parallel.trace.forward_history import Change, History, other_reads, run_history
from launcher.parallel.trace.python_streams import streams_kept
from launcher.parallel.trace.run_module import OTHER, in_memory, sample_inputs, trial_inputs
from launcher.parallel.trace.sample_values import FEW, SampleValues
from launcher.plan.values.model_graph import MovingAttribute

ROUNDS = 3
"""Number of forwards: the first fills caches, and the second may end a warm-up."""


def moving(model: nn.Module, inputs: Sequence[Tensor], looks: bool) -> tuple[MovingAttribute, ...]:
    """Returns the state that passes between forwards, and whether each item depends on the data.

    The state is in attributes of modules and in variables of their files. ``model`` is not changed. It runs
    in memory, or on meta tensors if it is too large or fails for the values tried. ``looks``: the model's
    Python code reads values of tensors. Such a model, or one with its own generator, can run only in memory,
    and variables are compared only there.
    """
    small = sum(t.numel() for t in (*model.parameters(), *model.buffers())) <= FEW
    looks = looks or owns_generator(model)
    out: tuple[MovingAttribute, ...] = ()
    for real, watched in ((True, True), (True, False), (False, True), (False, False)):
        if small if real else not looks:
            with suppress(Exception), torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
                out += _attributes(model, inputs, real, watched)
                break
    with suppress(Exception), torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        out += _variables(model, inputs) if small else ()
    return out


def moved_by_backwards(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[MovingAttribute, ...]:
    """Returns the state that a backward changes, and on which later results depend.

    The state is in attributes of modules and in variables of their files, or, if it depends on a gradient, in
    buffers. The same inputs then give another output or gradient. ``model`` is not changed. Nothing is found
    for a model that is too large to run in memory, or that fails.
    """
    small = sum(t.numel() for t in (*model.parameters(), *model.buffers())) <= FEW
    if not small or not any(map(hooks_backward, model.modules())):
        return ()
    names = files_of(model)

    def trained(batch: int) -> tuple[nn.Module, list[Tensor]]:
        one, xs = _ready(model, inputs, True, batch, parameter_hooks=True)
        torch.manual_seed(0)
        with torch.no_grad():
            for p in one.parameters():
                if p.is_floating_point() and not p.any():  # zeros would hide a gradient
                    p.uniform_(0.1, 1)
        _pass(one, xs)  # to fill caches
        return one, xs

    def contents(one: nn.Module) -> tuple[PythonState, PythonState]:
        return snapshot(one, by_contents=True), variables(names, by_contents=True)

    def counted(batch: int) -> tuple[bool, dict[str, None], tuple[PythonState, PythonState]]:
        """Returns whether two passes differ, the places that only their backwards change, and the state."""
        with put_back(names), contents_put_back(model):
            one, xs = trained(batch)
            before = [snapshot(one), variables(names)]
            first, second = _pass(one, xs), _pass(one, xs)
            middle, state = [snapshot(one), variables(names)], contents(one)
            for _ in range(2):
                _forward(one, xs, True)
            last = [snapshot(one), variables(names)]
            by_passes, by_forwards = (
                dict.fromkeys(name for a, b in zip(*two, strict=True) for name, _ in changed(a, b))
                for two in ((before, middle), (middle, last))
            )
            only = {n: None for n in by_passes if n not in by_forwards and not _tensor(one, n)}
            return not _same(first, second), only, state

    def after(scale: float) -> tuple[list[Any], tuple[PythonState, PythonState]]:
        """Returns the result of a pass after one with gradients of this scale, and the state between them."""
        with put_back(names), contents_put_back(model):
            one, xs = trained(0)
            _pass(one, xs, scale)
            state = contents(one)
            return _pass(one, xs), state

    moved: dict[str, bool] = {}
    with suppress(Exception), torch.random.fork_rng(devices=[]), streams_kept(), default_dtype(torch.float32):
        # state that depends on a gradient
        own, again = after(1.0), after(1.0)
        noise = _contents_apart(own[1], again[1])
        for scale in SCALES if _same(own[0], again[0]) else ():
            result, state = after(scale)
            if not _same(own[0], result):
                moved |= dict.fromkeys(sorted(_contents_apart(own[1], state) - noise), True)

        # other state, such as a count
        differs, only, state = counted(0)
        if differs and only:
            by_data = _contents_apart(state, counted(OTHER)[2]) - noise
            moved |= {name: moved.get(name, False) or name in by_data for name in only}
    return tuple(MovingAttribute(name, by_data, "backward") for name, by_data in moved.items())


SCALES = 1e3, 1e-3, 1e-6
"""Scales of the gradients of a model's output, to see what depends on them in the next forward."""


def _contents_apart(one: tuple[PythonState, PythonState], other: tuple[PythonState, PythonState]) -> set[str]:
    """Returns the attributes and variables with other contents."""
    return {name for a, b in zip(one, other, strict=True) for name, _ in changed(a, b)}


def _pass(model: nn.Module, xs: Sequence[Tensor], scale: float = 1.0) -> list[Any]:
    """Returns the outputs and the gradients of a forward and a backward, always with the same draws.

    ``scale``: the gradient of each element of the outputs.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model.zero_grad()
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x.clone() for x in xs]
    made = [t for t in tree_leaves(model(*leaves)) if isinstance(t, Tensor)]
    out = [t for t in made if t.requires_grad]
    torch.autograd.backward(out, [torch.full_like(t, scale) for t in out])
    learning = (*leaves, *model.parameters())
    return [*(t.detach().clone() for t in made), *(t.grad.clone() for t in learning if t.grad is not None)]


def _attributes(
    model: nn.Module, inputs: Sequence[Tensor], real: bool, watched: bool
) -> tuple[MovingAttribute, ...]:
    """Returns the attributes that pass state between forwards.

    ``real``: run in memory, on values of two batches of the data. ``watched``: note which operations use
    tensors of earlier forwards.
    """
    run = partial(_history, model, inputs, real, watched)
    same = run(0)
    other = run(OTHER) if real else same

    # what changes from one forward to the next, and what differs with other batches or reads
    moved = same.moved(1, ROUNDS)
    differ = _differing(same, other, partial(run, 0))
    late, tensors_of_late = _by_reads(same, partial(run, 0)) if real else (set(), set())
    used = same.seen.used if same.seen is not None else {}
    names = dict.fromkeys((*(key[0] for some in (moved, differ, late) for key in sorted(some)), *used))
    names = {n: None for n in names if not _tensor(same.model, n)}
    if not names:
        return ()

    # which of it is read before it is set again; reads of a tensor's attributes are not seen
    modules = dict(same.model.named_modules())
    read = {name for name in names if name.rpartition(".")[0] not in modules}
    xs = _ready_inputs(inputs, real, 0)
    with reading(same.model, names, read.add, only_first=True):
        _forward(same.model, xs, real)

    # a read of a tensor matters if an operation uses its values, or if other values give another result
    tensors = same.tensors() | other.tensors() | tensors_of_late if watched else set()
    matters = {name for name, _ in (moved | differ | late) - tensors}
    matters |= {name for name, _ in differ if not _same(same.out, other.out)}
    state = {n for n in names if n in used or (n in read and n in matters)}
    by_data = {name for name, _ in differ} | {n for n, tainted in used.items() if tainted}
    by_data |= {name for name, _ in late if name in state - by_data and _matters(same.model, name, xs)}
    changes = {name for name, _ in moved}
    return tuple(
        MovingAttribute(n, n in by_data) for n in names if n in state and (n in changes or n in by_data)
    )


def _history(
    model: nn.Module,
    inputs: Sequence[Tensor],
    real: bool,
    watched: bool,
    batch: int,
    change: Change | None = None,
) -> History:
    """Returns the history of some forwards on ``batch``, and of a last one that is always on the same."""
    one, xs = _ready(model, inputs, real, batch)
    batches = [*([xs] * ROUNDS), _ready_inputs(inputs, real, 0)]
    return run_history(one, batches, partial(_forward, looks=real), watched=watched, change=change)


def _differing(same: History, other: History, again: Callable[[], History]) -> set[Key]:
    """Returns the places with other contents after other batches or reads.

    ``again`` returns the history of ``same`` for another copy of the model: what differs there too has no
    contents to compare, or is never the same.
    """
    places = _places(same, other)
    return places - _places(same, again()) if places else places


def _places(one: History, other: History) -> set[Key]:
    pairs = zip(one.contents[:-1], other.contents[:-1], strict=True)
    return {key for a, b in pairs for key in changed(a, b)}


def _by_reads(same: History, run: Callable[[Change | None], History]) -> tuple[set[Key], set[Key]]:
    """Returns the places that differ if Python reads other numbers where these depend on data.

    So a branch that no batch of the trial takes is found too. Also returns the places of tensors.
    """
    out: set[Key] = set()
    tensors: set[Key] = set()
    for change in other_reads(same.seen.numbers if same.seen is not None else 0):
        with suppress(Exception):  # the model may refuse the numbers
            other = run(change)
            out |= _differing(same, other, partial(run, None))
            tensors |= other.tensors()
    return out, tensors


def _matters(model: nn.Module, name: str, xs: Sequence[Tensor]) -> bool:
    """Returns true unless other numbers in the attribute ``name`` give the same result and other state."""
    path, _, attribute = name.rpartition(".")
    owner = dict(model.named_modules()).get(path)
    value = getattr(owner, attribute, None)
    if not isinstance(value, bool | int | float):
        return True

    def after(value: Any) -> tuple[list[Any], PythonState]:
        one = copied(model)
        setattr(one.get_submodule(path), attribute, value)
        out = tree_leaves(_forward(one, xs, True))
        return out, snapshot(one, by_contents=True)

    own, again = after(value), after(value)
    noise = {name} | {n for n, _ in changed(own[1], again[1])}
    for other in (not value,) if isinstance(value, bool) else (value + 1, value + 1000, -value - 1):
        try:
            made = after(other)
        except Exception:
            return True
        if not _same(own[0], made[0]) or any(n not in noise for n, _ in changed(own[1], made[1])):
            return True
    return False


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
        states = [snapshot(one, by_contents=True) for one in (used, resumed, again)]
        noise = {*changed(*states[1:])}  # objects that each copy has its own of
        differ = dict.fromkeys(key[0] for key in changed(*states[:2]) if key not in noise)
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


def _ready(
    model: nn.Module, inputs: Sequence[Tensor], looks: bool, batch: int, parameter_hooks: bool = False
) -> tuple[nn.Module, list[Tensor]]:
    if not looks:
        return copied(model), _ready_inputs(inputs, looks, batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return in_memory(model, parameter_hooks=parameter_hooks), _ready_inputs(inputs, looks, batch)


def _ready_inputs(inputs: Sequence[Tensor], looks: bool, batch: int) -> list[Tensor]:
    return trial_inputs(inputs, batch) if looks else [torch.empty_like(x, device="meta") for x in inputs]


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
