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
    """The model on the meta device, which a build then splits into stages and lays out.

    ``whole`` returns the values of its tensors. ``axis`` is the tensor-parallel axis of its operators, which
    belongs to no rank yet. ``tracer`` has traced its forward, if the model runs in several stages.
    """

    model: nn.Module
    whole: FullTensorOf
    axis: Axis
    tracer: Tracer | None


def blueprint(model: nn.Module, whole: FullTensorOf, plan: Plan, inputs: tuple[TensorSpec, ...]) -> Blueprint:
    """Return the blueprint of ``model`` (on the meta device), turned into what a rank of ``tp`` runs."""
    axis = spread(model, plan)
    install(model, plan.recomputed, axis)
    narrow_frozen(model, plan)
    return Blueprint(model, whole, axis, traced(model, plan, inputs))
