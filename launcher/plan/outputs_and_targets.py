"""Checks that losses, metrics and steps can use the model's outputs and the data's targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Predict
from launcher.plan.plan import Plan
from launcher.plan.refusals.evaluation import evaluated_by
from launcher.plan.values.class_dims import class_dims
from launcher.plan.values.module_names import listed
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many

NUMBERS = ("int64", "uint8")
"""The dtypes of class indices that torch's cross entropy accepts."""

NUMBERED = ("mse", "bce")
"""Losses that compare numbers element by element."""

DATA, MODEL, PIECES = "data", "model", "parallel.pipeline.seq_chunks"
LOSS, METRICS, BROADCAST = "loss", "metrics", "parallel.pipeline.output_broadcast"
LOGITS = "return only the logits, such as out.logits or out['logits']"
IN_ONE_PIECE = f"{PIECES}=1 parallel.pipeline.scheduler=1f1b"


def classes(plan: Plan, target: Sequence[int]) -> int | None:
    """Returns the number of classes for targets of this shape; the number of samples does not matter.

    Returns ``None`` if the loss does not take class indices, or if no dim of the output can be the classes.
    """
    if not plan.objective.classes:
        return None
    shape = plan.output[0].shape
    dims = class_dims(shape, (*shape[:1], *target[1:]))
    return _number(plan, dims[0]) if dims else None


def _number(plan: Plan, dim: int) -> int:
    shape = plan.output[0].shape
    return shape[dim] * (plan.sizes.grid["tp"] if plan.operators.output is not None else 1)


def multiple_output_problems(job: Job, plan: Plan) -> Iterator[Problem]:
    """Yields a problem for each part of the request that takes one tensor, if the model returns several."""
    if not plan.output_keys:
        return
    outputs = _several(plan.output_keys)
    returns = f"but the model returns {outputs}"
    if plan.objective.loss != "_target_":
        text = f"its forward returns {outputs}, but loss={plan.objective.loss} takes one tensor"
        yield Problem(MODEL, f"{text}; {LOGITS}, or name a loss of your own in loss._target_")
    if plan.objective.ranked:
        names = listed([name for name, _ in plan.objective.ranked])
        yield Problem(METRICS, f"{names}: a built-in metric takes one tensor, {returns}")
    for name, step in job.steps.items():
        if step.kind in ("predict", "sample"):
            yield Problem(f"steps.{name}", f"this step takes one tensor, {returns}")
    if plan.output_broadcast:
        yield Problem(BROADCAST, f"true: it broadcasts one tensor, {returns}", f"{BROADCAST}=false")
    if plan.pieces:
        text = f"{len(plan.pieces)}: the outputs of all pieces are joined into one tensor, {returns}"
        yield Problem(PIECES, text, IN_ONE_PIECE)
    if plan.operators.output is not None or plan.sharding is not None:
        text = f"tp can cut the output only if it is one tensor, {returns}"
        cure = "leave the module that makes it out of parallel.operators"
        yield Problem("parallel.operators", text if plan.sharding is not None else f"{text}; {cure}")
    if not any(t.dtype.startswith(("float", "bfloat")) for t in plan.output):
        yield Problem(MODEL, "its forward returns only integers, which get no gradient")


def _several(keys: Sequence[str | int]) -> str:
    """
    >>> _several((0, 1)), _several(("logits", "value"))
    ('a tuple of 2 tensors', 'a dict of logits, value')
    """
    if all(isinstance(key, int) for key in keys):
        return f"a tuple of {many(len(keys), 'tensor')}"
    return f"a dict of {listed([str(key) for key in keys])}"


def sample_problems(plan: Plan, target: TensorSpec, own: bool) -> Iterator[Problem]:
    """Yields why a loss or metric cannot be computed, or would not mean what the user expects.

    ``target``: the targets of a micro batch; ``own``: the model is the user's.
    """
    if plan.output_keys:  # only the user's loss takes several tensors, and it may take any
        return
    output = plan.output[0]
    if not output.dtype.startswith(("float", "bfloat")):
        text = f"its forward returns {output.dtype}, but the loss takes floating-point logits, one per class"
        yield Problem(MODEL, text)
    if plan.objective.classes:
        yield from _class_numbers(plan, target, own)
    elif plan.objective.loss in NUMBERED:
        yield from _elements(plan, target)
    yield from _metric_problems(plan, target)
    if plan.objective.needs_full_output and plan.operators.output is not None:
        text = "your own loss or metric takes full outputs, but their last dim is cut over tp"
        cure = "leave the module that makes it out of parallel.operators"
        yield Problem("parallel.operators", f"{text}; {cure}")


def _class_numbers(plan: Plan, target: TensorSpec, own: bool) -> Iterator[Problem]:
    output = plan.output[0]
    if target.dtype not in NUMBERS:
        cure = "loss=mse" if target.dtype.startswith("float") and _output_shape(plan) == target.shape else ""
        text = f"targets are {target.dtype}, but the loss is the cross entropy of class numbers"
        yield Problem(DATA, f"{text}; return them as int64", cure)

    # the shapes decide which dim of the output has the classes
    fits = class_dims(output.shape, target.shape)
    shapes = f"targets are {_text(target)} and the model's output is {_text(output)}"
    text = f"for {target.shape[0]} samples {shapes}"
    if not fits:
        text += "; an output must be (samples, ..., classes) or (samples, classes, ...)"
        yield Problem(DATA, f"{text}, and targets must have all its dims except the classes")
    elif len(fits) > 1 and own:
        text += f": its classes may be on dim {fits[1]} or on dim {fits[0]}; choose sizes that differ"
        text += ", or name a loss of your own in loss._target_"
        yield Problem(DATA, text)
    elif fits[0] != len(output.shape) - 1:
        yield from _not_last(plan, fits[0])


def _output_shape(plan: Plan) -> tuple[int, ...]:
    """Returns the shape of the model's full output, before it is cut over ``tp``."""
    *shape, last = plan.output[0].shape
    return (*shape, last * (plan.sizes.grid["tp"] if plan.operators.output is not None else 1))


def _elements(plan: Plan, target: TensorSpec) -> Iterator[Problem]:
    """Yields the problems of a loss that compares outputs and targets element by element."""
    name, output = plan.objective.loss, replace(plan.output[0], shape=_output_shape(plan))
    shapes = (
        f"for {target.shape[0]} samples targets are {_text(target)} and the model's output is {_text(output)}"
    )
    if not target.dtype.startswith("float"):
        text = f"{name}: {shapes}; it compares them element by element: return targets as float32"
        yield Problem(LOSS, text)
    elif target.shape != output.shape:
        text = f"{name}: {shapes}; it compares them element by element: give both the same shape"
        yield Problem(LOSS, text)


def _metric_problems(plan: Plan, target: TensorSpec) -> Iterator[Problem]:
    """Yields the problems of metrics that compare class indices with logits."""
    output = plan.output[0]
    fits = class_dims(output.shape, target.shape)
    for name, k in plan.objective.ranked:
        if not fits or target.dtype not in NUMBERS:
            text = f"{name}: targets are {_text(target)} and the model's output is {_text(output)}"
            yield Problem(METRICS, f"{text}; it compares class numbers with logits")
        elif k >= _number(plan, fits[0]):
            text = f"{name}: with {_number(plan, fits[0])} classes every target is in the top {k}"
            yield Problem(METRICS, text)


def _not_last(plan: Plan, dim: int) -> Iterator[Problem]:
    text = f"the model's output has its classes on dim {dim}"
    if plan.operators.output is not None:
        text += ", and its last dim is cut over tp; leave the module that makes it out of parallel.operators"
        yield Problem("parallel.operators", text)
    elif plan.pieces:
        yield Problem(PIECES, f"{len(plan.pieces)}: sequences are cut on dim 1, and {text}", IN_ONE_PIECE)


def _text(t: TensorSpec) -> str:
    return f"{t.dtype} ({', '.join(map(str, t.shape))}{',' * (len(t.shape) == 1)})"


def uneven_held_out(job: Job, plan: Plan, held_out: int) -> Problem | None:
    """Returns the problem of held-out samples that do not fill the last micro batch, if there is one.

    Padding would change the statistics of modules that normalize over a micro batch in evaluation mode.
    """
    size, global_batch = plan.sizes.micro_batch, plan.sizes.global_batch
    readers = [s for s in job.steps.values() if isinstance(s, Evaluate | Predict)]
    limits = [s.batches for s in readers if getattr(s, "inputs", None) is None]
    if "train.eval_every" in evaluated_by(job):
        limits.append(job.train.eval_batches)
    read = [held_out if n is None else min(held_out, n * global_batch) for n in limits]
    mixed = plan.observed.mixed
    if not mixed or all(n % size == 0 for n in read):
        return None
    text = f"{listed(mixed)} normalizes over the samples of a micro batch also in evaluation mode"
    text += f", and the last of {held_out} held-out samples would share one with padding"
    way_out = f"let it track running statistics, or hold out a multiple of {size} samples"
    return Problem("model", f"{text}; {way_out}")
