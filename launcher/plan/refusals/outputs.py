"""Checks that a model returns values for each sample: the loss is a sum over samples in any micro batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.plan.values.facts import Graph, TensorSpec
from launcher.plan.values.text import many


def shared(graph: Graph, more: Sequence[TensorSpec] | None, samples: int) -> Iterator[Problem]:
    """Yields a problem for each output whose dim 0 is not the samples.

    A loss of the user's that takes such a tensor would depend on how a batch is cut into micro batches.

    Args:
        graph: a forward of ``samples`` samples.
        more: the outputs of a forward of one sample more, if there was one.
        samples: the number of samples in ``graph``.
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
