"""What all ranks would make of a model before each takes its part: ranks that are forked make it once, before that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from launcher.parallel.deferred_init.fill import Whole
from launcher.parallel.stages.split import traced
from launcher.parallel.tensor_parallel.apply import spread
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.trace.fx_glue import Tracer
from launcher.plan.plan import Plan
from launcher.plan.values.facts import TensorSpec


@dataclass(frozen=True)
class Blueprint:
    """For one build: that cuts ``model``, which is on the meta device, into its parts and lays them out.

    ``whole``: the numbers of its tensors; ``axis``: of its operators, of no rank yet; ``tracer`` has followed its
    forward, if it runs in several stages.
    """

    model: nn.Module
    whole: Whole
    axis: Axis
    tracer: Tracer | None


def blueprint(model: nn.Module, whole: Whole, plan: Plan, inputs: tuple[TensorSpec, ...]) -> Blueprint:
    """Of ``model`` (on the meta device), which becomes what one rank of ``tp`` runs."""
    axis = spread(model, plan)
    return Blueprint(model, whole, axis, traced(model, plan, inputs))
