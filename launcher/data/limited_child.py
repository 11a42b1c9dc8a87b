"""Runs one function on a stranger's data in a child process, with limits on its time and memory.

The limits of ``launcher.untrusted.bounded`` end Python code only. Native code, such as that of a tokenizer,
runs on after an alarm, and ends its process if it gets no more memory.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

from launcher.process_pool import Interpreter
from launcher.untrusted.bounded import limit_memory, limit_processor_time, silence_native_code

ENVIRON = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
PATIENCE = 30
"""The child is killed after this multiple of its processor time: it waits for something."""

T = TypeVar("T")
R = TypeVar("R")


class LimitExceeded(Exception):
    """The child was ended. The text, a clause, says which limit it exceeded."""


class ChildFailed(Exception):
    """The function raised an error, which is the text."""


def in_child(do: Callable[[T], R], task: T, *, module: str, seconds: int, nbytes: int) -> R:
    """Returns ``do(task)``, which a child process computes within the limits.

    ``seconds`` is processor time, and ``nbytes`` memory, both beyond what the child takes to import
    ``module``. Raises ``LimitExceeded`` and ``ChildFailed``.
    """
    child = Interpreter(partial(_answer, do, task, seconds, nbytes), module, ENVIRON)
    try:
        if not child.connection.poll(seconds * PATIENCE):
            raise LimitExceeded(f"it takes more than {seconds} s")
        answer, error = child.connection.recv()
    except (EOFError, ConnectionError) as ended:
        raise LimitExceeded(_limit(child.ended(), seconds, nbytes)) from ended
    finally:
        child.kill()
        child.close()
    if error:
        raise ChildFailed(error)
    result: R = answer
    return result


def _answer(do: Callable[[T], R], task: T, seconds: int, nbytes: int, connection: Connection) -> None:
    silence_native_code()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_processor_time(seconds)
    limit_memory(nbytes)
    message: tuple[R | None, str]
    try:
        message = do(task), ""
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)  # as native code does
    except Exception as error:
        message = None, str(error) or type(error).__name__
    connection.send(message)


def _limit(ended: str, seconds: int, nbytes: int) -> str:
    """Returns the limit that a child has exceeded, which ``ended`` as its parent says."""
    if signal.SIGXCPU.name in ended:
        return f"it takes more than {seconds} s"
    if signal.SIGABRT.name in ended:
        return f"it takes more than {nbytes >> 20} MiB"
    return f"its process {ended}"
