"""Propagates tensor-parallel splits: which operators communicate, and whether the rest is right.

The model runs twice on meta tensors: in full, and with one rank's pieces of the operators' weights. The
result of every operation of the second run must be exactly a part of the first run's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote
from typing import Any, Literal

import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError
from launcher.parallel.dispatch.modes import default_dtype, tree_leaves
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.sequence_chunks import Carry, attach
from launcher.parallel.tensor_parallel import apply
from launcher.parallel.tensor_parallel.collectives import Axis, bring
from launcher.parallel.tensor_parallel.op_rules import CutRefused, CutState
from launcher.parallel.tensor_parallel.sharding_tracker import FollowCalls, FollowOps, ShardingTracker
from launcher.parallel.trace.code_between_modules import RUNNING, refusing
from launcher.parallel.trace.data_dependence import looking
from launcher.parallel.trace.module_kinds import NORMS
from launcher.parallel.trace.run_module import needs_values, zeros
from launcher.parallel.trace.tensor_specs import meta
from launcher.plan.cut.sequence_chunks import shortened
from launcher.plan.tensor_parallel.module_strategies import ADAPTED, KEY, Cut, Operator, splits, tp_dim
from launcher.plan.tensor_parallel.sharded_operators import Comm, ShardedOperator, TensorParallelPlan
from launcher.plan.tensor_parallel.strategy_reader import axes_text
from launcher.plan.values.tensor_spec import TensorSpec

Lengths = tuple[int, ...]
"""The lengths of the pieces of a sequence; empty if sequences are not cut."""


def follow(
    model: nn.Module,
    operators: tuple[Operator, ...],
    tp: int,
    inputs: Sequence[TensorSpec],
    lengths: Lengths = (),
) -> TensorParallelPlan:
    """Returns how ``operators`` run in ``model`` (on meta), on full sequences or on pieces of these lengths.

    Raises ``RequestError`` if the results would be wrong.
    """
    if not operators or tp == 1:
        return TensorParallelPlan()
    forwards = _Forwards(operators, inputs, lengths)

    # in full, and then with the pieces of one rank
    full_run = ShardingTracker()
    _pass(copied(model), forwards, full_run)
    run = ShardingTracker(Axis(tp, planned=True), full_run.rows)
    part = copied(model)
    apply.cut(part, splits(operators), Axis(tp, planned=True))
    outs = _pass(part, forwards, run)
    for o in operators:
        if o not in run.spreads:
            text = f"{o.module} is never called by the forward, so there is nothing to cut"
            raise RequestError((Problem(o.where, text),))

    # no parameter has a gradient that is both full and a term
    output = [_output(some, run) for some in outs][-1]
    both = sorted(run.terms & run.full)
    if both:
        text = "combines tensors that are cut over tp with full ones: its gradient is neither full nor a sum"
        raise RequestError((Problem(KEY, f"{both[0]} {text}"),))

    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(p), name)
    return TensorParallelPlan(
        tuple(run.spreads.values()), tuple(n for n in first.values() if n in run.terms), output
    )


def flow_of_chunks(
    model: nn.Module, flow: TensorParallelPlan, tp: int, inputs: Sequence[TensorSpec], lengths: Lengths
) -> TensorParallelPlan:
    """Returns ``flow`` for sequences in chunks, with the same splits and other collectives.

    Raises ``RequestError`` if the chunks get other splits.
    """
    spreads = [replace(s, comms=()) for s in flow.spreads]
    out = follow(model, tuple(s.operator for s in spreads), tp, inputs, lengths=lengths)
    for a, s in zip(spreads, out.spreads, strict=True):
        if a != replace(s, comms=()):
            text = f"{s.operator.module} is cut differently for a piece of a sequence"
            raise RequestError((Problem(s.operator.where, f"{text} than for the full sequence"),))
    return out


@dataclass(frozen=True)
class _Forwards:
    """The forwards of a pass: ``operators`` run in a forward of ``inputs``, or of each piece in turn."""

    operators: tuple[Operator, ...]
    inputs: Sequence[TensorSpec]
    lengths: Lengths

    @property
    def pieces(self) -> list[list[TensorSpec]]:
        """The inputs of each forward."""
        total = sum(self.lengths)
        return [[shortened(s, n, total) for s in self.inputs] for n in self.lengths] or [list(self.inputs)]


def _pass(model: nn.Module, forwards: _Forwards, run: ShardingTracker) -> list[list[tuple[Tensor, CutState]]]:
    """Runs a pass, and returns the outputs of each forward.

    A model that reads values runs on zeros in memory.
    """
    clean = copied(model)
    try:
        return _passed(model, forwards, run, torch.device("meta"))
    except _Looks:
        run.restart()
        return _passed(zeros(clean), forwards, run, torch.device("cpu"))


def _passed(
    model: nn.Module, forwards: _Forwards, run: ShardingTracker, device: torch.device
) -> list[list[tuple[Tensor, CutState]]]:
    carry = Carry(forwards.lengths)
    attach(model, carry)
    _prepare(model, forwards.operators, run)

    # piece after piece, each with the state that earlier pieces left
    outs = []
    merged = dict[Operator, ShardedOperator]()
    for piece, specs in enumerate(forwards.pieces):
        run.spreads = {}
        with carry.running(0, piece) if forwards.lengths else nullcontext():
            xs = [torch.zeros_like(x, device=device) for x in meta(specs)]
            outs.append(_forward(model, run, xs, device))
        merged = _together(merged, run.spreads)
    run.spreads = merged
    return outs


def _prepare(model: nn.Module, operators: tuple[Operator, ...], run: ShardingTracker) -> None:
    """Lets ``run`` track the operators of ``model`` one by one, and where each operation is called."""
    # at first no tensor is split
    for b in model.buffers():
        run.tag(b, CutState())
    for name, p in model.named_parameters():
        run.tag(p, CutState(made=frozenset({name})))

    run.layers = frozenset(n for n, m in model.named_modules() if isinstance(m, (nn.Linear, *NORMS)))
    for o in operators:
        module = model.get_submodule(o.module)
        module.forward = partial(_operate, run, module, module.forward, o)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(_begin, run, name))
        module.register_forward_hook(partial(_end, run))


def _together(
    before: dict[Operator, ShardedOperator], now: dict[Operator, ShardedOperator]
) -> dict[Operator, ShardedOperator]:
    """Merges the operators of a sequence's pieces: their collectives add up."""
    out = {}
    for o, s in now.items():
        earlier = before.get(o)
        if earlier is not None and replace(earlier, comms=()) != replace(s, comms=()):
            text = f"{o.module} is cut differently for different pieces of a sequence"
            raise RequestError((Problem(o.where, text),))
        out[o] = s if earlier is None else replace(s, comms=(*earlier.comms, *s.comms))
    return out


class _Looks(Exception):
    """The model reads values of tensors."""


def _forward(
    model: nn.Module, run: ShardingTracker, xs: list[Tensor], device: torch.device
) -> list[tuple[Tensor, CutState]]:
    for x in xs:
        run.tag(x, CutState())

    # with values a model may branch on them, and only one branch is traced
    real = device.type != "meta"
    inputs = (*xs, *model.parameters(), *model.buffers())
    branches = looking(inputs, partial(_refuse, run)) if real else nullcontext()

    try:
        with refusing(model, xs), default_dtype(RUNNING), torch.no_grad(), device, _following(run, branches):
            out = model(*xs)
    except RequestError as error:
        if not real and needs_values(error.__cause__):
            raise _Looks from error
        raise RequestError(tuple(_with_cause(p, error.__cause__, run) for p in error.problems)) from None
    return [(t, run.state(t)) for t in tree_leaves(out) if isinstance(t, Tensor)]


@contextmanager
def _following(run: ShardingTracker, branches: AbstractContextManager[None]) -> Iterator[None]:
    with FollowOps(run), FollowCalls(run), branches:
        yield


def _refuse(run: ShardingTracker) -> None:
    """Refuses a branch on values, because only one side of it was traced."""
    at = run.where[-1] or "the model's own forward"
    text = f"{at} branches on the values of its inputs or weights"
    raise CutRefused(f"{text}; a branch cannot be traced next to operators that are cut over tp", KEY)


def _begin(run: ShardingTracker, name: str, *_: Any) -> None:
    run.where.append(name)


def _end(run: ShardingTracker, *_: Any) -> None:
    run.where.pop()


def _with_cause(p: Problem, why: BaseException | None, run: ShardingTracker) -> Problem:
    """Returns the problem with its cause; an error that occurs only with pieces is the strategy's fault."""
    at = run.where[-1] or "the model's own forward"
    if isinstance(why, CutRefused):
        text = str(why) if why.key else f"in {at}: {why}"
        return Problem(why.key or KEY, text, why.cure)
    if run.axis is None:
        return p
    line = next(iter(str(why).strip().splitlines()), "")
    hint = "; is the number of heads divisible by tp?" if "is invalid for input of size" in line else ""
    text = f"{at} fails with the shards that a rank of tp={run.axis.size} has"
    return Problem(KEY, f"{text}: {line}{hint}")


def _output(outs: list[tuple[Tensor, CutState]], run: ShardingTracker) -> Cut:
    """Returns the layout of the model's output: the loss takes full outputs, or one split on its classes."""
    for _, s in outs:
        run.full |= s.made
    t, dim = next(((t, s.cut) for t, s in outs if s.cut is not None), (None, None))
    if t is None or (len(outs) == 1 and t.dim() > 1 and dim == t.dim() - 1):
        return dim

    # the last operator can gather it
    last = [*run.spreads][-1]
    text = f"the model's output is cut on dim {dim} over tp"
    way = "the loss takes a full output or one cut on its classes"
    full_axes = axes_text(((),) * t.dim())
    cure = quote(f"{KEY}.{last.key}.output={full_axes}")
    raise RequestError((Problem(last.where, f"{text}, but {way}", cure),))


def _operate(
    run: ShardingTracker, module: nn.Module, plain: Callable[..., Any], o: Operator, *args: Any, **kwargs: Any
) -> Any:
    """Runs an operator and records what it communicates."""
    x, *rest = args or (kwargs.pop("input", None),)
    if not isinstance(x, Tensor):
        raise CutRefused(f"the first argument of {o.module} is not a tensor", o.where)
    if run.axis is None:
        return _run_uncut(run, o, lambda: plain(x, *rest, **kwargs))

    # its input, converted
    s = run.state(x)
    run.full |= s.made if s.cut is None else frozenset()
    planned = _into(o, x, s.cut, run.axis.size)
    log: list[Comm] = []
    terms = o.mode == "column"
    x = _quietly(run, log, lambda axis: bring(x, planned.arrives, planned.takes, axis, terms=terms))
    if s.cut is None and not s.made:  # no gradient flows back from here
        log[:] = [c for c in log if c.phase == "forward"]

    # its computation
    if o.mode:
        split = apply.OperatorForward(module, plain, planned, run.axis)
        y = _quietly(run, log, lambda _: split.compute(x, *rest, **kwargs))
    else:
        run.tag(x, CutState(planned.takes, frozenset({f"{o.module}()"} if s.made else ())))
        y = plain(x, *rest, **kwargs)
        planned = replace(planned, makes=run.state(_tensor(y, o)).cut)

    # its output, converted
    planned = _out_of(o, y, planned, run.axis.size)
    leaving = apply.OperatorForward(module, plain, planned, run.axis)
    y = _quietly(run, log, lambda _: leaving.hand_on(y))

    # record its spread, and the state of its result
    _note(run, o, module, replace(planned, comms=tuple(log)))
    run.row(f"operator {o.module}", [y])
    run.tag(y, CutState(planned.gives, frozenset({f"{o.module}()"})))
    return y


def _run_uncut(run: ShardingTracker, o: Operator, call: Callable[[], Any]) -> Any:
    """Runs an operator of the full model as it is."""
    run.quiet += bool(o.mode)
    y = call()
    run.quiet -= bool(o.mode)
    run.row(f"operator {o.module}", [_tensor(y, o)])
    return y


def _note(run: ShardingTracker, o: Operator, module: nn.Module, planned: ShardedOperator) -> None:
    """Records the spread of an operator; every call of it must need the same."""
    if run.spreads.setdefault(o, planned) != planned:
        raise CutRefused(f"{o.module} is called more than once, with different cuts", o.where)
    if o.mode == "row" and planned.gives is not None and getattr(module, "bias", None) is not None:
        run.terms.add(f"{o.module}.bias")
    if o.kind == ADAPTED and o.mode:
        run.terms.add(f"{o.module}.{'lora_A' if o.mode == 'column' else 'lora_B'}")


def _quietly(run: ShardingTracker, log: list[Comm], do: Callable[[Axis], Tensor]) -> Tensor:
    """Runs an operator's own work untracked, and log only what it would send."""
    assert run.axis is not None
    run.axis.log = log
    run.quiet += 1
    try:
        return do(run.axis)
    finally:
        run.quiet -= 1


def _tensor(y: Any, o: Operator) -> Tensor:
    if not isinstance(y, Tensor):
        raise CutRefused(f"{o.module} returns a {type(y).__name__}, not a tensor", o.where)
    return y


def _into(o: Operator, x: Tensor, arrives: Cut, n: int) -> ShardedOperator:
    """Returns the spread with the layout that arrives and the layout that the operator takes."""
    requested = _requested_cut(o, "input", x, n, now=arrives)
    if not o.mode:
        takes = arrives if o.input is None else requested
        return ShardedOperator(o, arrives, takes, makes=None, sums=False, gives=None, dims=(x.dim(), 0))
    takes = x.dim() - 1 if o.mode == "row" else None
    if o.input is not None and requested not in (arrives, takes):
        text = f"input {axes_text(o.input)} differs from the tensor that arrives, which is {_words(arrives)}"
        raise CutRefused(f"{o.module}: {text}", o.where)
    if takes is not None and arrives != takes and x.shape[takes] % n:
        text = f"{o.module}: its input has {x.shape[takes]} features, not a multiple of tp={n}"
        raise CutRefused(text, o.where)
    return ShardedOperator(o, arrives, takes, makes=None, sums=False, gives=None, dims=(x.dim(), 0))


def _out_of(o: Operator, y: Tensor, s: ShardedOperator, n: int) -> ShardedOperator:
    """Returns the spread with the layout that the operator computes and the layout that it returns."""
    sums = o.mode in ("row", "vocabulary")
    makes = y.dim() - 1 if o.mode else s.makes
    if sums:
        makes = None
    gives = makes if o.output is None else _requested_cut(o, "output", y, n, now=makes)
    return replace(s, sums=sums, makes=makes, gives=gives, dims=(s.dims[0], y.dim()))


def _requested_cut(o: Operator, name: Literal["input", "output"], t: Tensor, n: int, now: Cut) -> Cut:
    """Returns the dim that the strategy splits, checked against the tensor."""
    axes = o.input if name == "input" else o.output
    if axes is None:
        return None
    if len(axes) != t.dim():
        text = f"{o.module}: {name} {axes_text(axes)} has {len(axes)} dims, but the tensor has {t.dim()}"
        raise CutRefused(text, o.where)
    dim = tp_dim(axes)
    if dim is not None and dim != now and t.shape[dim] % n:
        cut = f"{name} {axes_text(axes)} cuts dim {dim} of size {t.shape[dim]}"
        raise CutRefused(f"{o.module}: {cut}, which is not divisible by tp={n}", o.where)
    return dim


def _words(cut: Cut) -> str:
    return "whole" if cut is None else f"cut over tp on dim {cut}"
