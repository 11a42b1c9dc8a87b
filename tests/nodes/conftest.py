"""Two nodes for each test that requests them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.nodes import Nodes, two_nodes


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two namespaces and a cable between them, removed after the test with all their processes."""
    with two_nodes() as pair:
        yield Nodes(pair)
