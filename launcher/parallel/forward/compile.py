"""The forward of a module that torch compiles."""

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
from launcher.parallel.forward import kept_operations
from launcher.parallel.forward.kept_operations import SENT
from launcher.parallel.forward.recompute import RecomputedForward
from launcher.parallel.stages.split import StagePart
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.partition.stages import covers
from launcher.plan.values.compilation import STAGE, Compilation

if TYPE_CHECKING:
    from launcher.parallel.forward.compile_times import CompileTimes

LOSS = "the loss"
_log = logging.getLogger(__name__)


def backends() -> tuple[str, ...]:
    """The compilers of this torch, and those that installed packages bring, by name."""
    from torch._dynamo import list_backends  # takes a second

    return tuple(list_backends(exclude_tags=()))


def compile_modules(parts: Iterable[StagePart], plan: Compilation | None, axis: Axis) -> CompileTimes | None:
    """Give each module of ``parts`` that is to be compiled the forward that is, around all that it has.

    FSDP2 hooks modules, not forwards: what it gathers and reduces stays outside of every graph.
    """
    if plan is None:
        return None
    from launcher.parallel.forward.compile_times import CompileTimes  # imports what takes a second

    # by its first name, for a module may have two
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
    """Those that ``part`` runs: what a stage hangs its modules under has a name there too."""
    if plan.modules == (STAGE,):
        return {STAGE: part.module}
    here = dict(part.module.named_modules(remove_duplicate=False))
    runs = part.stage.modules
    return {m: here[m] for m in plan.modules if m in here and any(covers(r, m) for r in runs)}


def _configure(modules: int, axis: Axis) -> None:
    """Settings of torch for the whole process."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    for name, value in tracing(modules, axis.size).items():
        setattr(dynamo, name, value)
    inductor.fallback_random = True  # dropout draws what it draws in eager code


def tracing(modules: int, tp: int) -> dict[str, Any]:
    """Settings of torch for the tracing of so many modules, whose operators are cut over ``tp`` ranks."""
    from torch._dynamo import config

    # blocks of one class share a list of graphs, and may all be unlike
    limit = config.recompile_limit + modules
    total = config.accumulated_recompile_limit + modules * limit
    found: dict[str, Any] = {"recompile_limit": limit, "accumulated_recompile_limit": total}

    # what operators that run again leave on the axis is for the next one in the same run
    if tp > 1:
        found["skip_fwd_side_effects_in_bwd_under_checkpoint"] = True
    return found


def _compiled(
    module: nn.Module, name: str, plan: Compilation, times: CompileTimes, axis: Axis
) -> Callable[..., Any]:
    """What stands in for the forward of ``module``."""
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
    """``loss`` of one micro batch as one graph: no copy of its logits in float32 is written."""
    return CompiledForward(LOSS, loss, _graph(loss, plan), plan, times, axis)


def traceable(module: nn.Module) -> Callable[..., Any]:
    """The forward of ``module`` as torch compiles it, with those inside of it that run again.

    One that runs again as a whole runs its graph again; what is kept is chosen among the graph's operations.
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
    """A compiled forward, around the ``plain`` one; without gradients, as in a validation, that one runs."""

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

        self.axis.last = None  # what a graph finds there is a part of its guards
        try:
            with self.times.of(self.name):
                return self.compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self.given_up = True
            text = "takes another graph in each call, and runs eagerly from here on"
            _log.warning("train.compile: %s %s", self.name or "a stage", text)
        except TorchDynamoException as error:
            raise RunError(self._failed(error)) from error
        finally:
            self.axis.last = None
        return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.plain, memo)  # the graph is that of the module that was compiled

    def _failed(self, error: Exception) -> str:
        text = f"train.compile: {self.plan.backend} cannot compile {self.name or 'a stage'}: {cause(error)}"
        if self.plan.fullgraph:
            return f"{text} (try: train.compile.fullgraph=false, which runs as it is what cannot be compiled)"
        return f"{text}; name other modules in train.compile.modules"


@dataclass(frozen=True)
class _Either:
    """The forward of a module that runs again, inside of a compiled one."""

    plain: RecomputedForward
    traced: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.traced if torch.compiler.is_compiling() else self.plain
        return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.plain, memo)


def _again(forward: RecomputedForward) -> Callable[..., Any]:
    """The same in a form that torch compiles: the graph of the backward begins with what is run again.

    What ``RecomputedForward`` guards against, inputs that are changed in place, a graph does not know.
    """
    plain, keep = forward.plain, forward.recomputed.keep
    if forward.axis.size > 1 and not forward.recomputed.comm:
        keep = (*keep, SENT)
    if not keep:

        def run_all(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        return run_all
    contexts = partial(kept_operations.contexts, keep)

    def run_most(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run_most


def cause(error: BaseException) -> str:
    """The first line, and the next one where that only leads to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
