"""What an evaluation may do to a model: nothing.

In plain torch a forward in evaluation mode changes what it changes: a counter of calls, a cache, statistics
of a BatchNorm that is kept awake; training and checkpoints go on from there, and what they go on from hangs
on how the held-out samples were batched. Here an evaluation looks: whatever buffers and Python attributes it
changes are put back, bit for bit, and the next step and the next checkpoint are those of a run that was never
evaluated. What the output itself depends on, from one forward to the next, would make the loss hang on the
batches too: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export
from launcher.plan.partition.sizes import Note
from launcher.plan.values.facts import Change, Graph, Skeleton
from launcher.plan.values.text import listed
from launcher.plan.verbs import evaluates


def asked(job: Job) -> tuple[str, ...]:
    """Who evaluates."""
    names = [n for n, s in job.steps.items() if evaluates(s)]
    trains = any(s.kind == "train" for s in job.steps.values())
    return (*(["train.eval_every"] if job.train.eval_every is not None and trains else []), *names)


def unsteady(skeleton: Skeleton, graph: Graph) -> tuple[str, ...]:
    """Of what a forward in evaluation mode changes that on which the next forward's output depends."""
    return tuple(c.name for c in _unsteady(skeleton, graph))


def _unsteady(skeleton: Skeleton, graph: Graph) -> Iterator[Change]:
    weights = {p.name for p in skeleton.params if not p.buffer}
    return (c for c in graph.effects.evaluated if not c.once and (c.read or weights & {*c.names}))


def problems(job: Job, skeleton: Skeleton, graph: Graph) -> Iterator[Problem]:
    """What the loss of an evaluation would depend on besides the weights; none where nobody evaluates."""
    who = asked(job)
    for c in _unsteady(skeleton, graph) if who else ():
        kind, end = ("buffer", ", which its output depends on") if c.read else ("parameter", "")
        text = f"in evaluation mode the forward changes the {kind} {c.name}{end}: the loss of"
        text += f" {' and '.join(who)} would depend on how the held-out samples are grouped into batches"
        yield Problem("model", f"{text}; change it only while self.training, or evaluate nothing")

    if not graph.effects.mixed:
        return
    mixed = listed(graph.effects.mixed)
    text = f"{mixed} in evaluation mode too normalizes over the samples of a micro batch,"
    text += " and one process would group other samples together"
    for name, step in job.steps.items():
        if isinstance(step, Export) and step.check:
            yield Problem(f"steps.{name}", text, f"steps.{name}.check=false")
        elif isinstance(step, Evaluate) and step.of != "run":
            yield Problem(f"steps.{name}", text)


def notes(job: Job, skeleton: Skeleton, graph: Graph) -> list[Note]:
    """What is put back, and what is not evaluated."""
    out = []
    drifting = unsteady(skeleton, graph)
    if drifting and any(s.kind == "certify" for s in job.steps.values()):
        text = f"a forward in evaluation mode changes {listed(drifting)}"
        out.append(Note("model", f"{text}: the certificate leaves the validation out"))
    names = [c.name for c in graph.effects.evaluated]
    if names and asked(job):
        them = "it is" if len(names) == 1 else "they are"
        text = f"a forward in evaluation mode changes {listed(names)}: {them} restored after each evaluation"
        out.append(Note("model", text))
    return out
