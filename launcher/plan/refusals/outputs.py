"""What a model returns must be of samples: a loss is added up over them, however a batch is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.plan.values.facts import Graph, TensorSpec
from launcher.plan.values.text import many


def shared(graph: Graph, more: Sequence[TensorSpec] | None, samples: int) -> Iterator[Problem]:
    """Of so many ``samples``, and of one ``more``: a tensor that does not grow with them is of no sample.

    What a loss of the user's own makes of it would hang on how a batch is cut into micro batches.
    """
    last = graph.nodes[-1]
    for n, made in enumerate(last.out or ()):
        name = f"{last.keys[n]!r} of " if last.keys else ""
        text = f"{name}what its forward returns is {_shape(made)} for {many(samples, 'sample')}"
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
