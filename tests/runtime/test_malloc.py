"""Memory that a rank frees on the CPU is reused: the tensors of its next operation take no new pages."""

from __future__ import annotations

import ctypes
import resource
import statistics

import pytest
import torch

from launcher.runtime import malloc
from launcher.runtime.cluster.world import World
from tests.ranks import here

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt, so nothing can be said to it"
)
MANY = 20
PAGES = MANY * (4 << 20) // resource.getpagesize()
"""The pages of all results, if each were new."""


def new_pages(world: World) -> float:
    """The median number of new pages per round. All results of a round are freed together, as activations are.

    A single round may need a few pages if a small object is allocated between them.
    """
    kept = torch.ones(1 << 20)
    each = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        several = [kept * n for n in range(MANY)]
        del several
        each.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(each)


def test_steps_take_no_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in malloc.MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert max(here(new_pages, 2)) < PAGES / 10


@pytest.mark.parametrize("name", malloc.MALLOC_VARIABLES)
def test_malloc_variables_of_the_user_are_respected(name: str) -> None:
    assert not malloc.keep_freed_memory({name: "4096"})
