"""Ranks of these tests are forked from a clean server: pytest itself plans, after which no child can use a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.runtime.processes import fork_server


@pytest.fixture(autouse=True, scope="module")
def clean_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched, fork_server.serving():
        patched.setattr(fork_server, "_forks_left", 0)
        yield
