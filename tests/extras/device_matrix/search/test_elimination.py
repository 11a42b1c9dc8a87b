"""Variable elimination finds the same as an exhaustive search, and equal parts are computed once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.extras.device_matrix.search import elimination
from launcher.extras.device_matrix.search.elimination import Eliminator, Scoped


def cost(states: tuple[int, ...], tables: list[Scoped]) -> float:
    return sum(float(t.table.costs[tuple(states[x] for x in t.scope)]) for t in tables)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 16))
def test_nothing_is_cheaper(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [int(n) for n in random.integers(1, 4, random.integers(1, 6))]
    eliminator = Eliminator()
    tables = []
    for n in range(random.integers(1, 7)):
        scope = np.sort(random.choice(len(sizes), random.integers(1, min(3, len(sizes)) + 1), replace=False))
        costs = random.integers(0, 9, [sizes[x] for x in scope]).astype(float)
        tables.append(Scoped(tuple(int(x) for x in scope), eliminator.table(n, costs)))
    found = tuple(eliminator.solve(sizes, tables))
    assert cost(found, tables) == min(cost(s, tables) for s in itertools.product(*map(range, sizes)))


def chain(eliminator: Eliminator, length: int) -> list[Scoped]:
    costs = np.random.default_rng(0).random((5, 5))
    return [Scoped((x, x + 1), eliminator.table("link", costs)) for x in range(length)]


def test_a_ring_of_equal_links_takes_as_many_steps_as_it_can_be_halved() -> None:
    """Layers between an embedding and a head that are tied form such a ring."""
    steps = []
    for length in (64, 128, 256):
        eliminator = Eliminator()
        closing = Scoped((0, length), eliminator.table("closing", np.ones((5, 5))))
        eliminator.solve([5] * (length + 1), [*chain(eliminator, length), closing])
        steps.append(eliminator.steps)
        assert eliminator.steps + eliminator.reused == length + 1
    assert steps[2] - steps[1] == steps[1] - steps[0] <= 6


def test_worst_states_are_dropped_where_a_table_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    eliminator = Eliminator()
    tables = chain(eliminator, 4)
    exact = cost(tuple(eliminator.solve([5] * 5, tables)), tables)
    monkeypatch.setattr(elimination, "LIMIT", 20)
    found = tuple(eliminator.solve([5] * 5, tables))
    assert eliminator.dropped > 0
    assert exact <= cost(found, tables) <= 1.5 * exact
