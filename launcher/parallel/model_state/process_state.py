"""Reads and restores the state of a model's process: environment variables, settings of Python and torch.

A forward may change it; nothing else in this package does. Planning restores it. The functions whose results
differ from call to call, or from process to process, are listed here too.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

VARIABLE = "the environment variable"


def _directory() -> str | None:
    """Returns the working directory; ``None`` if it no longer exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _filters() -> tuple[Any, ...]:
    """Returns the filters of warnings; they are restored, but not compared: no numbers depend on them."""
    return tuple(warnings.filters)


def _set_filters(value: tuple[Any, ...]) -> None:
    """Puts the filters back as they were; ``resetwarnings`` also makes Python drop its cache of them."""
    warnings.resetwarnings()
    warnings.filters[:] = value  # type: ignore[index]


SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("the working directory", _directory, os.chdir),
    ("the recursion limit of Python", sys.getrecursionlimit, sys.setrecursionlimit),
    ("the default dtype of torch", torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads of torch", torch.get_num_threads, torch.set_num_threads),
    ("torch.use_deterministic_algorithms", _deterministic, _set_deterministic),
    (
        "the precision of float32 matrix products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
)
"""The name of each setting, the function that reads it and the function that sets it."""


def process_state() -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each environment variable and setting."""
    for key, value in os.environ.items():
        yield f"{VARIABLE} {key}", value
    for name, read, _ in SETTINGS:
        yield name, read()


class ProcessSnapshot:
    """The present state of the process, which ``restore`` brings back."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        settings = [*((read, write) for _, read, write in SETTINGS), (_filters, _set_filters)]
        self._settings = [(read, write, read()) for read, write in settings]

    def restore(self) -> None:
        """Sets back what has changed."""
        for key in os.environ.keys() - self._environment:
            del os.environ[key]
        for key, value in self._environment.items():
            if os.environ.get(key) != value:
                os.environ[key] = value
        for read, write, value in self._settings:
            if value is not None and read() != value:
                write(value)


LATER = 12_345.678
"""Seconds by which a clock is put forward."""


def _after(seconds: float) -> float:
    return seconds + LATER


def _nanoseconds_after(count: int) -> int:
    return count + round(LATER * 1e9)


def _next(number: int) -> int:
    return number + 1


def _other_host(name: str) -> str:
    return f"{name}-2"


def _other_bytes(drawn: bytes) -> bytes:
    return bytes(255 - b for b in drawn)


def _other_id(value: uuid.UUID) -> uuid.UUID:
    return uuid.UUID(int=value.int ^ 1)


CLOCKS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    *((time, name, _after) for name in ("time", "monotonic", "perf_counter", "process_time")),
    *((time, f"{n}_ns", _nanoseconds_after) for n in ("time", "monotonic", "perf_counter", "process_time")),
    (os, "urandom", _other_bytes),
    (uuid, "uuid1", _other_id),
    (uuid, "uuid4", _other_id),
)
"""Functions that return another value at each call: module, name, and a function that changes the value."""

PLACES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (os, "getpid", _next),
    (os, "getppid", _next),
    (socket, "gethostname", _other_host),
    (platform, "node", _other_host),
)
"""Functions that return another value in each process, or on each machine."""
