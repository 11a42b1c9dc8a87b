"""Losses and metrics from their settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.job.schema import components as schema
from launcher.job.schema import objective
from launcher.job.schema.user_class import Target
from launcher.objective import metrics
from launcher.objective.losses import ClassLoss, ElementLoss, Loss
from launcher.objective.user_defined import OwnLoss, OwnMetric

PLAIN = objective.CrossEntropy()
CPU = torch.device("cpu")


def build_loss(settings: schema.Loss, allow: tuple[str, ...] = (), device: torch.device = CPU) -> Loss:
    """Builds the loss. ``allow`` lists the packages that ``_target_`` may name. Raises ``RequestError``."""
    match settings:
        case objective.CrossEntropy():
            return ClassLoss(settings)
        case Target():
            return OwnLoss(settings, allow, device)
        case _:
            return ElementLoss(binary=isinstance(settings, objective.BCE))


def build_metrics(
    settings: Sequence[schema.Metric],
    loss: schema.Loss,
    allow: tuple[str, ...] = (),
    token_bytes: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> tuple[metrics.Metric, ...]:
    """Builds the metrics.

    ``loss`` says which targets count. ``token_bytes`` has the bytes of each token, if the data has them.
    """
    ignored = loss.ignore_index if isinstance(loss, objective.CrossEntropy) else PLAIN.ignore_index

    def built(one: schema.Metric) -> metrics.Metric:
        match one:
            case objective.Accuracy():
                return metrics.TopK(objective.figure(one), 1, ignored)
            case objective.TopK():
                return metrics.TopK(objective.figure(one), one.k, ignored)
            case objective.Perplexity():
                return metrics.Perplexity(ignored)
            case objective.BitsPerByte():
                assert token_bytes is not None, "the planner refuses bits_per_byte without them"
                return metrics.BitsPerByte(ignored, torch.tensor(token_bytes, device=device))
            case _:
                return OwnMetric(one, allow, device)

    return tuple(map(built, settings))
