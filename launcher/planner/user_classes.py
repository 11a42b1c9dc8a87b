"""Checks the classes that a user brings: callbacks, loggers, data sets, losses, metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from launcher.errors import Problem, RequestError
from launcher.job.schema.data import apart
from launcher.job.schema.did_you_mean import did_you_mean, nearest
from launcher.job.schema.job import Job
from launcher.job.schema.models import ModelTarget
from launcher.job.schema.user_class import Target
from launcher.job.targets import check, is_installed, locate, missing_module
from launcher.plan.plan import Plan
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner.rank_variable_reads import same_on_all_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn


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
