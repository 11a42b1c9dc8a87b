"""The graph that ``debug.graphs`` shows: the graph that stages are cut from, or the modules of one stage."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import RequestError
from launcher.job.schema.components import foreign
from launcher.job.schema.job import Job
from launcher.plan.partition import stage_config
from launcher.plan.values.facts import DTYPE, Graph, TensorSpec
from launcher.planner.trace_model import ModelRead


def drawn_graph(
    job: Job, model: ModelRead, whole: Sequence[str] | None, specs: tuple[TensorSpec, ...], graph: Graph
) -> Graph | None:
    """Returns the graph to show, or ``None`` if none is requested.

    ``graph`` was traced between the modules ``whole``. A model that runs unchanged as one stage is traced
    once more, between the modules that stages would have; if that fails, ``graph`` shows the order in which
    they ran.
    """
    if not job.debug.graphs:
        return None
    if whole is not None:
        return graph

    from launcher.parallel.model_state.references import leaving, unmarked
    from launcher.parallel.trace import model_facts

    units = frozenset(stage_config.units(model.skeleton))
    dtype = model_facts.dtype_of(DTYPE[job.train.precision])
    try:
        with model_facts.default_dtype(dtype), unmarked(model.marks), leaving(model.module):
            return model_facts.graph(model.module, units, specs, ours=not foreign(job.model))
    except RequestError:
        return graph
