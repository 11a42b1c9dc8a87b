"""A run folder belongs to one launcher at a time."""

from __future__ import annotations

import os
import time

import pytest

from launcher.errors import RequestError
from launcher.runtime.run_folder import locked


def test_a_lock_waits_for_ranks_whose_launcher_is_dead(tmp_path):
    holder, ready = os.pipe(), os.pipe()
    if (parent := os.fork()) == 0:
        with locked(tmp_path):
            if os.fork() == 0:  # a rank inherits the lock
                os.write(ready[1], b"x")
                os.read(holder[0], 1)
            os._exit(0)
    os.waitpid(parent, 0)
    os.read(ready[0], 1)
    os.write(holder[1], b"x")
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} ")
    for fd in (*holder, *ready):
        os.close(fd)


def test_a_lock_waits_for_a_child_of_an_earlier_run_of_this_process(tmp_path):
    with locked(tmp_path):
        if (child := os.fork()) == 0:
            time.sleep(0.3)
            os._exit(0)
    began = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - began > 0.1
    os.waitpid(child, 0)


def test_the_second_of_two_locks_is_refused(tmp_path):
    told = rf"^run_dir: {tmp_path}: another launcher is using it "
    with locked(tmp_path), pytest.raises(RequestError, match=told), locked(tmp_path):
        raise AssertionError("two of them")
