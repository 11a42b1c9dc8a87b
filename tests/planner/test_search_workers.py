"""Processes that plan layouts may be killed: a line says so."""

from __future__ import annotations

from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from launcher.errors import RunError
from launcher.extras.layout_search.workers import Workers


def test_one_that_has_ended_is_a_line():
    line, end = Pipe()
    end.close()
    crew = Workers(None, None, [line])
    with pytest.raises(RunError) as caught:
        crew([SimpleNamespace(trace=1)] * 2, len)
    assert str(caught.value) == (
        "a process that plans layouts for this search has ended: a user or the system killed it "
        "(out of memory? see dmesg)"
    )
