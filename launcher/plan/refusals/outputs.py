"""A model that returns several tensors, in a tuple or a dict: only a loss of the user's own takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.values.text import listed, many

ALONE = "return the logits alone, those of a dict or an object by their name, as in out.logits"
PIECES = "parallel.pipeline.seq_chunks"
BROADCAST = "parallel.pipeline.output_broadcast"


def problems(job: Job, plan: Plan) -> Iterator[Problem]:
    """Why not everything that is asked for can take them."""
    if not plan.output_keys:
        return
    what = said(plan.output_keys)
    returns = f"and the model returns {what}"
    if plan.objective.loss != "_target_":
        text = f"its forward returns {what}, and loss={plan.objective.loss} takes one tensor"
        yield Problem("model", f"{text}; {ALONE}, or give a loss of your own by loss._target_")
    if plan.objective.ranked:
        names = listed([name for name, _ in plan.objective.ranked])
        yield Problem("metrics", f"{names}: of one tensor, {returns}")
    for name, step in job.steps.items():
        if step.kind in ("predict", "sample"):
            yield Problem(f"steps.{name}", f"it takes one tensor, {returns}")
    if plan.output_broadcast:
        yield Problem(BROADCAST, f"true: one tensor reaches every stage, {returns}", f"{BROADCAST}=false")
    if plan.pieces:
        text = f"{len(plan.pieces)}: pieces of a sequence are put together as one tensor, {returns}"
        yield Problem(PIECES, text, f"{PIECES}=1 parallel.pipeline.scheduler=1f1b")
    if plan.operators.output is not None or plan.sharding is not None:
        text = f"an output that is cut over tp is one tensor, {returns}"
        cure = "leave the module that makes it out of parallel.operators"
        yield Problem("parallel.operators", text if plan.sharding is not None else f"{text}; {cure}")
    if not any(t.dtype.startswith(("float", "bfloat")) for t in plan.output):
        yield Problem("model", "its forward returns whole numbers only, which get no gradient")


def said(keys: Sequence[str | int]) -> str:
    """
    >>> said((0, 1)), said(("logits", "value"))
    ('a tuple of 2 tensors', 'a dict of logits, value')
    """
    if all(isinstance(key, int) for key in keys):
        return f"a tuple of {many(len(keys), 'tensor')}"
    return f"a dict of {listed([str(key) for key in keys])}"
