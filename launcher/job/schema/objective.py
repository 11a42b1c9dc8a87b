"""Settings of each loss and of each metric."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from launcher.job.schema.base import Count, Integer, Number, Rate, Settings


class CrossEntropy(Settings):
    """Cross entropy of logits and class numbers: the mean over the targets that are not ignored."""

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    z_loss: Rate = Field(
        0.0, description="weight of the squared log of the softmax's denominator in the loss"
    )
    ignore_index: Integer = Field(-100, description="a target that is ignored")


class MSE(Settings):
    """Squared error: the mean over all elements."""

    name: Literal["mse"] = "mse"


class BCE(Settings):
    """Binary cross entropy of logits and numbers from 0 to 1: the mean over all elements."""

    name: Literal["bce"] = "bce"


class Accuracy(Settings):
    name: Literal["accuracy"] = "accuracy"


class TopK(Settings):
    name: Literal["top_k"] = "top_k"
    k: Count = 5


class Perplexity(Settings):
    name: Literal["perplexity"] = "perplexity"


class BitsPerByte(Settings):
    name: Literal["bits_per_byte"] = "bits_per_byte"


NamedMetric = Accuracy | TopK | Perplexity | BitsPerByte


def named_metrics(metrics: Any) -> Any:
    """Expands each metric that is only a word to its settings.

    >>> named_metrics(["accuracy", {"name": "top_k", "k": 3}])
    [{'name': 'accuracy'}, {'name': 'top_k', 'k': 3}]
    """
    if not isinstance(metrics, list | tuple):
        return metrics
    return [{"name": one} if isinstance(one, str) else one for one in metrics]


def figure(metric: object) -> str:
    """Returns the name of a metric in a run's metrics; for a user's own class, derived from the class name.

    >>> figure(TopK(k=3)), figure({"_target_": "my_metrics.MeanAbsError"})
    ('top_3', 'mean_abs_error')
    """
    if isinstance(metric, TopK):
        return f"top_{metric.k}"
    own = metric.get("_target_") if isinstance(metric, Mapping) else getattr(metric, "target", None)
    if own is not None:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(own).rpartition(".")[2]).lower()
    return str(getattr(metric, "name", ""))
