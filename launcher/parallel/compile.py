"""Compiles modules with torch.compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.errors import RunError
from launcher.parallel import selective_recompute
from launcher.parallel.compile_times import CompileTimes
from launcher.parallel.recompute import RecomputedForward
from launcher.parallel.selective_recompute import SENT
from launcher.parallel.stages import StagePart
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.cut.stages import covers
from launcher.plan.values.compilation import STAGE, Compilation

if TYPE_CHECKING:
    pass

LOSS = "the loss"
_log = logging.getLogger(__name__)


def backends() -> tuple[str, ...]:
    """Returns the names of torch's compiler backends, and of those that installed packages add."""
    from torch._dynamo import list_backends  # takes a second

    return tuple(list_backends(exclude_tags=()))


def compile_modules(parts: Iterable[StagePart], plan: Compilation | None, axis: Axis) -> CompileTimes | None:
    """Replaces the forward of each module that the plan compiles with a compiled forward.

    FSDP2 hooks modules, not forwards: its gathers and reductions stay outside of every graph.
    """
    if plan is None:
        return None

    # each under its first name: a module may have two
    chosen: dict[nn.Module, str] = {}
    for part in parts:
        for name, module in _modules(part, plan).items():
            chosen.setdefault(module, name)

    _configure(len(chosen) + plan.loss, axis)
    times = CompileTimes()
    for module, name in chosen.items():
        vars(module)["forward"] = _compiled(module, name, plan, times, axis)
    return times


def _modules(part: StagePart, plan: Compilation) -> dict[str, nn.Module]:
    """Returns the modules to compile that ``part`` runs.

    A module that only contains modules of the stage has a name in ``part`` too, but the stage never runs it.
    """
    if plan.modules == (STAGE,):
        return {STAGE: part.module}
    here = dict(part.module.named_modules(remove_duplicate=False))
    runs = part.stage.modules
    return {m: here[m] for m in plan.modules if m in here and any(covers(r, m) for r in runs)}


def _configure(modules: int, axis: Axis) -> None:
    """Sets torch's options for the entire process."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    for name, value in tracing(modules, axis.size).items():
        setattr(dynamo, name, value)
    inductor.fallback_random = True  # dropout draws the same values as in eager code


def tracing(modules: int, tp: int) -> dict[str, Any]:
    """Returns torch's options for tracing so many ``modules``, with operators split over ``tp`` ranks."""
    from torch._dynamo import config

    # blocks of one class share one list of graphs, and each may need its own graph
    limit = config.recompile_limit + modules
    total = config.accumulated_recompile_limit + modules * limit
    options: dict[str, Any] = {"recompile_limit": limit, "accumulated_recompile_limit": total}

    # recomputed operators leave results on the axis for the next operator in the same run
    if tp > 1:
        options["skip_fwd_side_effects_in_bwd_under_checkpoint"] = True
    return options


def _compiled(
    module: nn.Module, name: str, plan: Compilation, times: CompileTimes, axis: Axis
) -> Callable[..., Any]:
    """Returns the compiled forward of ``module``."""
    outer = module.forward
    compiled = _graph(traceable(module), plan)
    if isinstance(outer, RecomputedForward) and not outer.recomputed.keep:
        return replace(outer, plain=CompiledForward(name, outer.plain, compiled, plan, times, axis))
    return CompiledForward(name, outer, compiled, plan, times, axis)


def _graph(run: Callable[..., Any], plan: Compilation) -> Callable[..., Any]:
    mode = None if plan.mode == "default" else plan.mode
    made: Callable[..., Any] = torch.compile(
        run, backend=plan.backend, mode=mode, fullgraph=plan.fullgraph, dynamic=plan.dynamic
    )
    return made


def compile_loss(
    loss: Callable[..., Any], plan: Compilation, times: CompileTimes, axis: Axis
) -> Callable[..., Any]:
    """Compiles ``loss`` of one micro batch as one graph, which writes no float32 copy of its logits."""
    return CompiledForward(LOSS, loss, _graph(loss, plan), plan, times, axis)


def traceable(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward of ``module`` for torch to compile; adapts its recomputed submodules in place.

    If the module itself is recomputed, its full graph is recomputed; the results to keep are chosen
    among the graph's operations.
    """
    for inner in module.modules():
        inside = vars(inner).get("forward")
        if inner is not module and isinstance(inside, RecomputedForward):
            vars(inner)["forward"] = _Either(inside, _again(inside))
    forward = module.forward
    if not isinstance(forward, RecomputedForward):
        return forward
    return _again(forward) if forward.recomputed.keep else forward.plain


@dataclass
class CompiledForward:
    """A compiled forward; ``plain`` runs in its place while gradients are off, as in validation."""

    name: str
    plain: Callable[..., Any]
    compiled: Callable[..., Any]
    plan: Compilation
    times: CompileTimes
    axis: Axis
    given_up: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.given_up or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        self.axis.last = None  # its content would become a part of the graph's guards
        try:
            with self.times.of(self.name):
                return self.compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self.given_up = True
            text = "needs a new graph in each call, so it runs eagerly from now on"
            _log.warning("train.compile: %s %s", self.name or "a stage", text)
        except TorchDynamoException as error:
            raise RunError(self._failed(error)) from error
        finally:
            self.axis.last = None
        return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.plain, memo)  # the graph belongs to the module that was compiled

    def _failed(self, error: Exception) -> str:
        text = f"train.compile: {self.plan.backend} cannot compile {self.name or 'a stage'}: {cause(error)}"
        if self.plan.fullgraph:
            return f"{text} (try: train.compile.fullgraph=false, which runs uncompilable code eagerly)"
        return f"{text}; name other modules in train.compile.modules"


@dataclass(frozen=True)
class _Either:
    """The forward of a recomputed module inside a compiled one."""

    plain: RecomputedForward
    traced: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.traced if torch.compiler.is_compiling() else self.plain
        return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.plain, memo)


def _again(forward: RecomputedForward) -> Callable[..., Any]:
    """Returns a recomputed forward that torch can compile: the graph of the backward begins by running it.

    Unlike ``RecomputedForward``, a graph does not check if inputs are changed in place.
    """
    plain, keep = forward.plain, forward.recomputed.keep
    if forward.axis.size > 1 and not forward.recomputed.comm:
        keep = (*keep, SENT)
    if not keep:

        def run_all(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        return run_all
    contexts = partial(selective_recompute.operation_contexts, keep)

    def run_most(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run_most


def cause(error: BaseException) -> str:
    """Returns the first line of the message, and the next one if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
