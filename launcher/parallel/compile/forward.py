"""The forward of a module that torch compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.errors import RunError
from launcher.parallel.recompute import kept_operations
from launcher.parallel.recompute.forward import RecomputedForward
from launcher.parallel.stages.split import StagePart
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.partition.stages import covers
from launcher.plan.values.compilation import STAGE, Compilation

if TYPE_CHECKING:
    from launcher.parallel.compile.times import CompileTimes

_log = logging.getLogger(__name__)


def compile_modules(parts: Iterable[StagePart], plan: Compilation | None, axis: Axis) -> CompileTimes | None:
    """Give each module of ``parts`` that is to be compiled the forward that is, around all that it has.

    FSDP2 hooks modules, not forwards: what it gathers and reduces stays outside of every graph.
    """
    if plan is None:
        return None
    from launcher.parallel.compile.times import CompileTimes  # these take a second to import

    times = CompileTimes()
    _settle(sum(len(_modules(part, plan)) for part in parts), axis)
    done: set[nn.Module] = set()  # a module may have two names
    for part in parts:
        for name, module in _modules(part, plan).items():
            if module not in done:
                vars(module)["forward"] = _compiled(module, name, plan, times, axis)
            done.add(module)
    return times


def _modules(part: StagePart, plan: Compilation) -> dict[str, nn.Module]:
    """Those of ``plan`` that are in ``part``: a stage may hang a module under those around it, which nobody calls."""
    if plan.modules == (STAGE,):
        return {STAGE: part.module}
    here = dict(part.module.named_modules(remove_duplicate=False))
    runs = part.stage.modules
    return {m: here[m] for m in plan.modules if m in here and any(covers(r, m) for r in runs)}


def _settle(modules: int, axis: Axis) -> None:
    """Of torch, for the whole process: blocks of one class share a list of graphs, and may all be unlike."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.recompile_limit += modules
    dynamo.accumulated_recompile_limit += modules * dynamo.recompile_limit
    if axis.size > 1:  # what operators that run again leave on it is for the next one in the same run
        dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    inductor.fallback_random = True  # dropout draws what it draws in eager code


def _compiled(
    module: nn.Module, name: str, plan: Compilation, times: CompileTimes, axis: Axis
) -> Callable[..., Any]:
    """What stands in for the forward of ``module``: one that runs again as a whole runs its graph again."""
    for inner in module.modules():
        inside = vars(inner).get("forward")
        if inner is not module and isinstance(inside, RecomputedForward):
            vars(inner)["forward"] = _Either(inside, _traceable(inside))

    def graph(plain: Callable[..., Any], run: Callable[..., Any]) -> CompiledForward:
        mode = None if plan.mode == "default" else plan.mode
        compiled = torch.compile(
            run, backend=plan.backend, mode=mode, fullgraph=plan.fullgraph, dynamic=plan.dynamic
        )
        return CompiledForward(name, plain, compiled, plan, times, axis)

    outer = module.forward
    if not isinstance(outer, RecomputedForward):
        return graph(outer, outer)
    if outer.recomputed.keep:  # which is chosen among the operations of a graph
        return graph(outer, _traceable(outer))
    return replace(outer, plain=graph(outer.plain, outer.plain))


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
            _log.warning(
                "train.compile: %s takes another graph in each call, and runs eagerly from here on", self.name
            )
        except TorchDynamoException as error:
            raise RunError(self._failed(error)) from error
        finally:
            self.axis.last = None
        return self.plain(*args, **kwargs)

    def _failed(self, error: Exception) -> str:
        name, why = self.name or "a stage", _cause(error)
        text = f"train.compile: {self.plan.backend} cannot compile {name}: {why}"
        if self.plan.fullgraph:
            return f"{text} (try: train.compile.fullgraph=false, which runs as it is what cannot be compiled)"
        return f"{text}; name other modules in train.compile.modules"


@dataclass(frozen=True)
class _Either:
    """The forward of a module inside of a compiled one that is run again in the backward."""

    plain: RecomputedForward
    traced: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.traced(*args, **kwargs)
        return self.plain(*args, **kwargs)


def _traceable(forward: RecomputedForward) -> Callable[..., Any]:
    """The same in a form that torch compiles: the graph of the backward then begins with what is run again.

    What ``RecomputedForward`` guards against, inputs that are changed in place, a graph does not know.
    """
    plain, keep = forward.plain, forward.recomputed.keep
    if not keep:

        def run_all(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        return run_all
    contexts = kept_operations.contexts(keep)

    def run_most(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run_most


def _cause(error: BaseException) -> str:
    """The first line, and the next one where that only leads to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
