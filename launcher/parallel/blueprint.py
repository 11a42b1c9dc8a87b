"""The part of a build that is the same on every rank: made once before the fork, and shared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from launcher.parallel.deferred_init.fill import FullTensorOf
from launcher.parallel.forward.recompute import install
from launcher.parallel.stages.half_model import narrow_frozen
from launcher.parallel.stages.split import traced
from launcher.parallel.tensor_parallel.apply import spread
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.trace.fx_glue import Tracer
from launcher.plan.plan import Plan
from launcher.plan.values.facts import TensorSpec


@dataclass(frozen=True)
class Blueprint:
    """What one build starts from: ``model``, on the meta device, which it cuts into stages and lays out.

    ``whole``: the numbers of its tensors; ``axis``: the tensor-parallel axis of its operators, which belongs
    to no rank yet; ``tracer``: has traced its forward, if it runs in several stages.
    """

    model: nn.Module
    whole: FullTensorOf
    axis: Axis
    tracer: Tracer | None


def blueprint(model: nn.Module, whole: FullTensorOf, plan: Plan, inputs: tuple[TensorSpec, ...]) -> Blueprint:
    """The blueprint of ``model`` (on the meta device), which becomes what one rank of ``tp`` runs."""
    axis = spread(model, plan)
    install(model, plan.recomputed, axis)
    narrow_frozen(model, plan)
    return Blueprint(model, whole, axis, traced(model, plan, inputs))
