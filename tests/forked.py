"""Runs ``python -m WORDS`` in a fork of this process, which need not import torch again.

A test sees the same from outside as with a fresh interpreter: arguments, environment, folder, streams, signals and
session. Tests of imports, paths and the installed command start a fresh interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TextIO

import launcher.planner.plan_job
import launcher.run.run
import launcher.steps.certify
import launcher.steps.evaluate
import launcher.steps.on_ranks  # noqa: F401

ROOT = Path(__file__).parents[1]
FIRST = 3
"""The first file descriptor that is not a standard stream."""


def python(*words: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Starts the process in a new session, in the folder of the checkout.

    ``env``: variables in addition to those of this process. ``options``: further arguments of ``Popen``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, text=True, start_new_session=True,
        preexec_fn=lambda: _become(words, os.environ | (env or {})), **options,
    )  # fmt: skip


def _become(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Runs the module in the forked child, and exits; so ``Popen`` never executes a program.

    ``Popen`` waits for the child on a pipe until the child closes it.
    """
    code = 1
    try:
        gc.freeze()
        faulthandler.disable()
        os.closerange(FIRST, os.sysconf("SC_OPEN_MAX"))
        _as_at_the_start(env)
        sys.argv = ["", *words[1:]]
        sys.path[0:0] = [str(ROOT)]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _as_at_the_start(env: Mapping[str, str]) -> None:
    """Undoes what pytest and earlier tests have set for this process."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    resource_tracker._resource_tracker.__init__()  # an earlier test may have started one, whose pipe is closed now
    sys.stdin = _stream(0, "r")
    sys.stdout = sys.__stdout__ = _stream(1, "w")
    sys.stderr = sys.__stderr__ = _stream(2, "w")
    sys.excepthook = sys.__excepthook__
    warnings.resetwarnings()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("launcher").handlers.clear()
    for logger in logging.root.manager.loggerDict.values():  # torch's handlers have streams with closed descriptors
        for handler in [*getattr(logger, "handlers", ())]:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
            elif getattr(handler, "stream", None) is not None:  # of pytest: a file of the run may get its descriptor
                logger.removeHandler(handler)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stream(fd: int, mode: str) -> TextIO:
    return open(fd, mode, encoding="utf-8", closefd=False, buffering=1 if fd == 2 else -1)
