"""What an evaluation may do to a model: nothing.

In plain torch a forward in evaluation mode changes what it changes: a counter of calls, a cache, statistics of a
BatchNorm that is kept awake; training and checkpoints go on from there, and what they go on from hangs on how the
held-out samples were batched. Here an evaluation looks: whatever buffers and Python attributes it changes are put back,
bit for bit, and the next step and the next checkpoint are those of a run that was never evaluated. What the output
itself depends on, from one forward to the next, would make the loss hang on the batches too: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema import Job
from launcher.job.steps import Evaluate, Export
from launcher.plan.facts import Graph, Skeleton
from launcher.plan.sizes import Note
from launcher.plan.words import listed


def asked(job: Job) -> tuple[str, ...]:
    """Who evaluates."""
    names = [
        n for n, s in job.steps.items()
        if isinstance(s, Evaluate) or (isinstance(s, Export) and s.check) or s.kind == "certify"
    ]  # fmt: skip
    trains = any(s.kind == "train" for s in job.steps.values())
    return (*(["train.eval_every"] if job.train.eval_every is not None and trains else []), *names)


def problems(job: Job, skeleton: Skeleton, graph: Graph) -> Iterator[Problem]:
    """What an evaluation cannot undo, or what its loss would depend on; none where nobody evaluates."""
    who = asked(job)
    weights = {p.name for p in skeleton.params if not p.buffer}
    for c in graph.effects.evaluated if who else ():
        if c.once or not (c.read or weights & {*c.names}):
            continue
        kind, end = ("parameter", "") if weights & {*c.names} else ("buffer", ", which its output depends on")
        text = f"in evaluation mode the forward changes the {kind} {c.name}{end}: the loss of {' and '.join(who)} would"
        text += " depend on how held-out samples are cut into batches"
        yield Problem("model", f"{text}; change it only while self.training, or evaluate nothing")
    for name, step in job.steps.items() if graph.effects.mixed else ():
        if isinstance(step, Export | Evaluate) and (step.check if isinstance(step, Export) else step.of != "run"):
            text = f"{listed(graph.effects.mixed)} in evaluation mode too normalizes over the samples of a micro batch,"
            cure = f"steps.{name}.check=false" if isinstance(step, Export) else ""
            yield Problem(f"steps.{name}", f"{text} and one process would take other ones together", cure)


def notes(job: Job, graph: Graph) -> list[Note]:
    """What is put back."""
    names = [c.name for c in graph.effects.evaluated] if asked(job) else []
    if not names:
        return []
    them = "it is" if len(names) == 1 else "they are"
    text = f"a forward in evaluation mode changes {listed(names)}: {them} put back after each evaluation"
    return [Note("model", text)]
