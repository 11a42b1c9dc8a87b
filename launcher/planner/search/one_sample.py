"""Plans the full model on one rank of tp with micro batches of one sample, from which bounds are derived."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.planner.search import bounds
from launcher.planner.search.bounds import Whole
from launcher.planner.search.evaluate import Question
from launcher.planner.search.layout import Layout, Trace, job_of
from launcher.planner.trace_model import keeps_messages
from launcher.planner.traces import Traces


@dataclass(frozen=True)
class OneSample:
    """Layouts with the same cut, one for each number of stages."""

    layouts: tuple[Layout, ...]

    @property
    def trace(self) -> Trace:
        return self.layouts[0].cut, 1, all(layout.stages == 1 for layout in self.layouts)


def whole(asked: Question, sample: OneSample, traces: Traces) -> Whole | str:
    """The cost of the model, or why it cannot be planned; uses the fewest stages, but several if possible."""
    kept = traces.keeps_messages
    found = _planned(asked, sample, traces)
    if isinstance(found, str):
        return found
    _, plan = found
    return bounds.whole(plan, asked.speeds, keeps_messages() if kept is None else kept)


def growth(asked: Question, sample: OneSample, traces: Traces) -> float:
    """The seconds of a second sample relative to those of the first. The sample must have a plan."""
    found = _planned(asked, sample, traces)
    assert not isinstance(found, str), found
    layout, plan = found
    return bounds.growth(plan, plan_job(_unsharded(asked, layout, 2), traces), asked.speeds)


def _planned(asked: Question, sample: OneSample, traces: Traces) -> tuple[Layout, Plan] | str:
    why = ""
    for layout in sorted(sample.layouts, key=lambda one: (one.stages == 1, one.stages)):
        try:
            return layout, plan_job(_unsharded(asked, layout), traces)
        except RequestError as error:
            why = f"{error.problems[0].key}: {error.problems[0].text}"
    return why


def _unsharded(asked: Question, layout: Layout, micro: int = 1) -> Job:
    """The request for ``layout``: unsharded weights, no recomputation, ``micro`` samples a micro batch."""
    job = job_of(asked.job, layout, asked.named)
    pipe = job.parallel.pipeline.model_copy(
        update={"micro_batch_num": layout.stages, "scheduler": "1f1b", "interleave": False}
    )
    parallel = job.parallel.model_copy(update={"pipeline": pipe, "hsdp": None, "recompute": None})
    train = job.train.model_copy(update={"batch_size": layout.replicas * layout.stages * micro})
    return job.model_copy(update={"parallel": parallel, "train": train})
