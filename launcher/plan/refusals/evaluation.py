"""Refuses evaluations whose loss would depend on how samples are batched, and outputs not given per sample.

In plain torch, a forward in evaluation mode may change state: a counter of calls, a cache, the statistics of
a BatchNorm that stays in training mode. Training and checkpoints then continue from that state, which depends
on how the held-out samples were batched. Here an evaluation has no effects: all buffers and Python attributes
that it changes are restored bit for bit, and the next step and the next checkpoint are those of a run that
was never evaluated. If the output of a forward depends on state that an earlier forward changed, the loss
would depend on the batches too, so such a model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export
from launcher.plan.values.model_graph import Graph, ModelStructure, StateChange
from launcher.plan.values.module_names import listed
from launcher.plan.values.note import Note
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many
from launcher.plan.verbs import evaluates


def evaluated_by(job: Job) -> tuple[str, ...]:
    """Returns the settings and steps of the request that evaluate the model."""
    names = [n for n, s in job.steps.items() if evaluates(s)]
    trains = any(s.kind == "train" for s in job.steps.values())
    return (*(["train.eval_every"] if job.train.eval_every is not None and trains else []), *names)


def unsteady(skeleton: ModelStructure, graph: Graph) -> tuple[str, ...]:
    """Returns what a forward in evaluation mode changes and the next forward's output depends on."""
    return (*(c.name for c in _unsteady(skeleton, graph)), *graph.effects.eval_state_reads)


def _unsteady(skeleton: ModelStructure, graph: Graph) -> Iterator[StateChange]:
    weights = {p.name for p in skeleton.params if not p.buffer}
    return (c for c in graph.effects.evaluated if not c.once and (c.read or weights & {*c.names}))


def evaluation_problems(job: Job, skeleton: ModelStructure, graph: Graph) -> Iterator[Problem]:
    """Yields problems if a requested evaluation would depend on more than the weights and the samples."""
    who = evaluated_by(job)
    for c in _unsteady(skeleton, graph) if who else ():
        kind, end = ("buffer", ", which its output depends on") if c.read else ("parameter", "")
        yield _grouped(who, f"the {kind} {c.name}{end}")
    for name in graph.effects.eval_state_reads if who else ():
        yield _grouped(who, f"{name}, which its output depends on")

    if not graph.effects.mixed:
        return
    mixed = listed(graph.effects.mixed)
    text = f"{mixed} normalizes over the samples of a micro batch also in evaluation mode,"
    text += " and one process would group other samples together"
    for name, step in job.steps.items():
        if isinstance(step, Export) and step.check:
            yield Problem(f"steps.{name}", text, f"steps.{name}.check=false")
        elif isinstance(step, Evaluate) and step.of != "run":
            yield Problem(f"steps.{name}", text)


def _grouped(who: tuple[str, ...], changed: str) -> Problem:
    text = f"in evaluation mode the forward changes {changed}: the loss of {' and '.join(who)}"
    text += " would depend on how the held-out samples are grouped into batches"
    return Problem("model", f"{text}; change it only while self.training, or evaluate nothing")


def notes(job: Job, skeleton: ModelStructure, graph: Graph) -> list[Note]:
    """Returns notes on what is restored after an evaluation, and on what is not evaluated."""
    out = []
    drifting = unsteady(skeleton, graph)
    if drifting and any(s.kind == "certify" for s in job.steps.values()):
        text = f"a forward in evaluation mode changes {listed(drifting)}"
        out.append(Note("model", f"{text}: the certificate leaves the validation out"))
    names = [c.name for c in graph.effects.evaluated]
    if names and evaluated_by(job):
        verb = "it is" if len(names) == 1 else "they are"
        text = f"a forward in evaluation mode changes {listed(names)}: {verb} restored after each evaluation"
        out.append(Note("model", text))
    return out


def shared(graph: Graph, more: Sequence[TensorSpec] | None, samples: int) -> Iterator[Problem]:
    """Yields a problem for each output whose dim 0 is not the samples.

    A user's loss that takes such a tensor would depend on how a batch is cut into micro batches.

    Args:
        graph: a forward of ``samples`` samples.
        more: the outputs of a forward of one more sample, if it was run.
        samples: the number of samples in ``graph``.
    """
    last = graph.nodes[-1]
    for n, made in enumerate(last.out or ()):
        name = f"{last.keys[n]!r} of " if last.keys else ""
        text = f"{name}the output of its forward is {_shape(made)} for {many(samples, 'sample')}"
        if more is not None and len(more) == len(last.out or ()):
            if more[n].shape == (samples + 1, *made.shape[1:]) and made.shape[:1] == (samples,):
                continue
            text += f" and {_shape(more[n])} for {samples + 1}"
        elif made.shape[:1] == (samples,):
            continue
        why = "the loss is summed over samples, across all micro batches"
        yield Problem("model", f"{text}; {why}: return one or more numbers for each sample along dim 0")


def _shape(made: TensorSpec) -> str:
    return f"({', '.join(map(str, made.shape))}{',' * (len(made.shape) == 1)})"
