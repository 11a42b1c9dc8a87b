"""Limits of the system on this process: open files, and a folder for temporary files."""

from __future__ import annotations

import errno
import resource
import tempfile
from collections.abc import Iterator

from launcher.errors import Problem, error_text
from launcher.job.schema.job import Job

FILES = 40
"""Open files of a process that leads or trains, besides those for each rank of its machine; measured."""
FILES_PER_RANK = 2


def problems(job: Job) -> Iterator[Problem]:
    """Yields problems of this process that would end a run after it has started."""
    if job.launch.slurm is not None or job.launch.k8s is not None:  # it starts elsewhere
        return
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + FILES_PER_RANK * (job.launch.nproc or 1)
    if allowed != resource.RLIM_INFINITY and allowed < need:
        text = (
            f"this process may open {allowed} files, and a run of {job.launch.nproc or 1} ranks needs {need}"
        )
        yield Problem("", f"{text}: ulimit -n 1024 allows more, where the system permits it")
    try:
        tempfile.gettempdir()
    except OSError:
        text = (
            "no folder for temporary files can be written: neither /tmp nor /var/tmp nor the current folder"
        )
        yield Problem("", f"{text}; TMPDIR=FOLDER in the environment names another one")


def exhausted(error: OSError) -> str:
    """Returns the message about the limit of the system that caused ``error``; "" for other errors."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error_text(error)}: this process may open too few files; ulimit -n 1024 allows more"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        text = f"{error_text(error)}: the system gives this user no more processes or memory"
        return f"{text}; ulimit -u and ulimit -v show the limits"
    return ""
