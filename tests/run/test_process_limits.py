"""Limits of the system that a run would exceed after its start."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from launcher.run import process_limits
from tests.plan.made import job


def test_a_machine_without_a_folder_for_temporary_files_is_refused(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    assert [*process_limits.problems(job())] == []
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert [str(problem) for problem in process_limits.problems(job())] == [
        "no folder for temporary files can be written: neither /tmp nor /var/tmp nor the current folder; "
        "TMPDIR=FOLDER in the environment names another one"
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EMFILE, "x: Too many open files: this process may open too few files; ulimit -n 1024 allows more"),
        (
            errno.EAGAIN,
            "x: Resource temporarily unavailable: the system gives this user no more processes or memory; "
            "ulimit -u and ulimit -v show the limits",
        ),
        (errno.ENOENT, ""),
    ],
)
def test_an_exhausted_limit_is_a_line(number, text):
    assert process_limits.exhausted(OSError(number, os.strerror(number), "x")) == text
