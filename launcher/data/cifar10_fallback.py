"""Replaces CIFAR-10 by MNIST digits if its folder is missing and the request permits it."""

from __future__ import annotations

from pathlib import Path

from launcher.job.schema.components import Data
from launcher.job.schema.data import Cifar10, Mnist5k
from launcher.job.schema.job import Job


def with_data_read(job: Job) -> Job:
    """Returns ``job`` with the data that will actually be read."""
    return job.model_copy(update={"data": resolve(job.data)[0]})


def resolve(settings: Data) -> tuple[Data, str | None]:
    """Returns the data that will be read, and a note if they differ from the data requested.

    It checks only whether ``root`` exists.
    """
    if not isinstance(settings, Cifar10) or settings.fallback == "none" or Path(settings.root).exists():
        return settings, None
    note = (
        f"data cifar10 -> mnist5k: {settings.root} (data.root) does not exist, and data.fallback=mnist5k; "
        "digits are padded to 32 x 32 pixels in 3 channels"
    )
    return Mnist5k(name="mnist5k", size=32, channels=3), note
