"""Ranks of these tests are children of one clean server: pytest's own process plans, which a device does not survive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.runtime.processes import fork_server


@pytest.fixture(autouse=True, scope="module")
def clean_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched, fork_server.serving():
        patched.setattr(fork_server, "_forks_left", 0)
        yield
