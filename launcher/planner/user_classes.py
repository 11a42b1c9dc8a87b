"""Checks the classes that a user brings: callbacks, loggers, data sets, losses, metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.data import apart
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.job import Job
from launcher.job.schema.models import ModelTarget
from launcher.job.schema.user_class import Target
from launcher.job.targets import check, is_installed, locate, missing_module
from launcher.plan.plan import Plan
from launcher.plan.refusals import evaluation
from launcher.plan.sizes import Sizes
from launcher.plan.values.note import Note
from launcher.plan.values.precision import COMPUTE, DTYPE
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner.rank_variable_reads import same_on_all_ranks
from launcher.planner.trial_samples import SPREAD, spread_samples

if TYPE_CHECKING:
    from torch import Tensor, nn

    from launcher.data.source import Dataset


HOOKS = ("on_start", "on_step", "on_eval", "on_save", "on_end")


def callback_problems(job: Job) -> list[Problem]:
    """Returns problems of the callbacks: missing classes, unknown or no hooks, unsuitable arguments."""
    return _class_problems(job, "callbacks", job.callbacks, _hooks)


def _class_problems(
    job: Job,
    section: str,
    targets: Iterable[Target],
    unsuitable: Callable[[type, str, str], Iterator[Problem]],
) -> list[Problem]:
    """Returns problems of user classes: missing, ``unsuitable``, or with arguments that do not fit."""
    problems: list[Problem] = []
    for i, target in enumerate(targets):
        key = f"{section}.{i}._target_"
        try:
            cls = locate(target.target, job.security.allow, object, key=key)
            problems += unsuitable(cls, target.target, key)
            check(target, job.security.allow, object, key=key)
        except RequestError as error:
            problems += error.problems
    return problems


def _hooks(cls: type, name: str, key: str) -> Iterator[Problem]:
    hooks = [n for n in dir(cls) if n.startswith("on_") and callable(getattr(cls, n))]
    known = ", ".join(HOOKS)
    if not hooks:
        yield Problem(key, f"{name}: has no hook; the hooks are {known}")
    for hook in hooks:
        if hook not in HOOKS:
            right = nearest(hook, HOOKS)
            yield Problem(
                key,
                (
                    f"{name}: the launcher does not call its "
                    f"{hook}{did_you_mean(right) or f'; the hooks are {known}'}"
                ),
            )


CALLS = {"on_start": ("config", "plan", "folder"), "log": ("row",), "close": ()}
"""The methods of a logger and their arguments; all but ``log`` may be missing."""


def logger_problems(job: Job) -> list[Problem]:
    """Returns problems of the loggers: missing classes, no ``log``, methods or arguments that do not fit."""
    return _class_problems(job, "logger.others", job.logger.others, _methods)


def _methods(cls: type, name: str, key: str) -> Iterator[Problem]:
    if not callable(getattr(cls, "log", None)):
        called = ", ".join(f"{method}({', '.join(names)})" for method, names in CALLS.items())
        yield Problem(key, f"{name}: has no method log; a logger has {called}, of which log is required")
    for method, parameters in CALLS.items():
        act = getattr(cls, method, None)
        if not inspect.isfunction(act):
            continue
        try:
            inspect.signature(act).bind(None, *parameters)
        except TypeError as error:
            yield Problem(key, f"{name}: cannot be called as {method}({', '.join(parameters)}): {error}")


DOCUMENTS = "documents"
PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def missing_modules(job: Job) -> list[Problem]:
    """Returns problems of user classes in modules that do not exist; imports nothing."""
    keys = ("model", "data", "loss", "optim", "schedule")
    named = [(f"{k}._target_", getattr(job, k)) for k in keys] + [("metrics", m) for m in job.metrics]
    named += [(f"callbacks.{i}._target_", c) for i, c in enumerate(job.callbacks)]
    named += [(f"logger.others.{i}._target_", c) for i, c in enumerate(job.logger.others)]
    return [
        missing_module(key, s.target)
        for key, s in named
        if isinstance(s, Target) and not is_installed(s.target)
    ]


def files(job: Job) -> list[str]:
    """Returns the Python modules that define the user's model.

    They may count or store what they construct.
    """
    if not isinstance(job.model, Target):
        return []
    from torch import nn

    from launcher.job.targets import factory
    from launcher.parallel.model_state import module_globals as modules

    return modules.files(factory(job.model.target, job.security.allow, nn.Module, key="model._target_"))


def document_problems(job: Job, model: Callable[[], nn.Module]) -> Iterator[Problem]:
    """Refuses a model that does not take documents as its second input: it would be silently wrong.

    ``model`` returns the user's model; it is called only if the data have documents.
    """
    documents = apart(job.data)
    if documents is None or not isinstance(job.model, ModelTarget):
        return
    takes = [p.name for p in signature(model().forward).parameters.values() if p.kind in PLACED]
    if takes[1:2] != [DOCUMENTS]:
        text = f"{documents.value}: the forward of {job.model.target} takes ({', '.join(takes)})"
        text = f"{text}, but it must also take {DOCUMENTS}"
        cure = f"define forward(self, tokens, {DOCUMENTS}), with attention only within documents"
        yield Problem(documents.key, f"{text}; {cure}", documents.cure)


DATA_KEY = "data._target_"


def data_notes(job: Job, sizes: Sizes) -> list[Note]:
    """Returns notes on how the data set is read.

    Opens it, and reads some items more than once; raises ``RequestError``.
    """
    if not isinstance(job.data, Target):
        return []
    return [*_reading_notes(job, job.data, sizes), *_rounded(job)]


def _reading_notes(job: Job, settings: Target, sizes: Sizes) -> list[Note]:
    from launcher.data.torch_datasets.open import opened
    from launcher.data.torch_datasets.repeatable_items import unsteady, unsteady_source

    with same_on_all_ranks(DATA_KEY, settings.target, sizes.grid.size):
        one, again = (opened(settings, job.seed, job.security.allow) for _ in range(2))
        if one.reading == "shuffled":  # a Source, which is not read in epochs
            refuse([*unsteady_source(settings.target, one.train, again.train)])
            return []
        refuse([*unsteady(one, again)])
    refuse([*_too_few(one, job, sizes)])
    return [*_notes(one, settings)]


def _rounded(job: Job) -> Iterator[Note]:
    """Yields a note for each float input in which the compute dtype rounds a column of whole numbers.

    They may be ids, which a forward converts back: another row of the table would be trained.
    """
    compute = COMPUTE[job.train.precision]
    if compute == DTYPE[job.train.precision]:
        return
    from launcher.parallel.trace.tensor_specs import dtype_of

    for at, x in enumerate(spread_samples(job, SPREAD)):
        if not x.is_floating_point():
            continue
        columns = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(-1, 1)
        whole = columns[:, (columns == columns.round()).all(0)]
        rounded = whole.to(dtype_of(compute)).to(x.dtype)
        if (differ := whole != rounded).any():
            before, after = whole[differ][0], rounded[differ][0]
            text = f"input {at} has columns of whole numbers, and {job.train.precision} rounds them"
            cure = "if they are ids, pass them as an input of an integer dtype"
            yield Note(DATA_KEY, f"{text}, such as {before:.9g} to {after:.9g}: {cure}")


def _too_few(data: Dataset, job: Job, sizes: Sizes) -> Iterator[Problem]:
    """Refuses a data set with fewer samples than the run will read."""
    name = job.data.target if isinstance(job.data, Target) else ""
    need, have = sizes.steps * sizes.global_batch, len(data.train)
    if data.reading == "in order" and have < need and job.debug.overfit is None:
        steps = have // sizes.global_batch
        text = f"{sizes.steps}: steps of {sizes.global_batch} samples need {need}, but {name} has {have}"
        yield Problem("train.steps", text, f"train.steps={steps}" if steps else "")
    if not len(data.val):
        for who in evaluation.evaluated_by(job):
            text = f"{name} has no held-out samples; name them in data.val, or evaluate nothing"
            yield Problem(who if "." in who else f"steps.{who}", text)


def _notes(data: Dataset, settings: Target) -> Iterator[Note]:
    from launcher.data.torch_datasets.readers import IndexedStream

    if isinstance(data.train, IndexedStream):
        text = "a stream: each data-parallel rank reads all of it and keeps its own rows"
        on = "loads its state_dict" if data.train.place() is not None else "reads it again up to its place"
        yield Note(DATA_KEY, f"{settings.target} is {text}; a resumed run {on}")
    elif data.reading == "in epochs" and data.fraction:
        text = f"{len(data.val)} of {len(data.train) + len(data.val)} samples are held out, drawn once"
        default = "" if "val_fraction" in settings.arguments else f"null -> {data.fraction}: "
        yield Note("data.val_fraction", f"{default}{text}")


def objective_problems(job: Job, made: Plan, target: TensorSpec) -> Iterator[Problem]:
    """Yields problems of each loss and metric.

    Raises ``RequestError`` if one cannot be constructed or called.
    """
    import torch

    from launcher.objective.user_defined import OwnLoss, OwnMetric, Tried, counting_problem, problem

    allow = job.security.allow
    output = tuple(replace(t, shape=t.shape[1:]) for t in made.output)
    pieces, (targets, more), cpu = bool(made.pieces), _targets(job, target), torch.device("cpu")
    batches = made.sizes.micro_batch, made.sizes.local_batch, made.sizes.global_batch
    ranks = made.sizes.grid.size
    if isinstance(job.loss, Target):
        key, name = "loss._target_", job.loss.target
        with same_on_all_ranks(key, name, ranks):
            loss = OwnLoss(job.loss, allow, cpu)
            tried = Tried(key, name, loss.pair, output, targets, pieces, made.output_keys, more, batches)
            refusal = problem(tried, loss.count) or counting_problem(tried, loss.instance)
        yield from [refusal] if refusal else []
    for one in job.metrics:
        if isinstance(one, Target):
            with same_on_all_ranks("metrics", one.target, ranks):
                metric = OwnMetric(one, allow, cpu)
                shown = "metrics", one.target, metric.pair, output, targets, pieces, made.output_keys
                tried = Tried(*shown, more, batches)
                alone = "Compute it from its arguments alone"
                refusal = counting_problem(tried, metric.instance, alone) or problem(tried)
            yield from [refusal] if refusal else []


def _targets(job: Job, spec: TensorSpec) -> tuple[Tensor, Tensor | None]:
    """Returns the targets of the first samples, and of more of them; ``None`` if these cannot be read.

    For built-in data, which planning does not open, they are class ids 0 and 1.
    """
    import numpy as np
    import torch

    from launcher.objective.user_defined import MORE, SAMPLES

    if isinstance(job.data, Target):
        from launcher.data.open import open_data

        source = open_data(job.data, seed=job.seed, allow=job.security.allow).train
        first, more = source.targets(np.arange(min(SAMPLES, len(source)))), None
        with suppress(Exception):  # the run reports it, if it reads these samples
            more = source.targets(np.arange(min(MORE, len(source))))
        return first, more
    count = np.prod((SAMPLES, *spec.shape[1:]), dtype=int)
    return (torch.arange(count) % 2).view(SAMPLES, *spec.shape[1:]), None
