"""Two nodes for each test that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.nodes import Nodes, two_nodes


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two namespaces and a cable between them, gone after the test with all that is at work there."""
    with two_nodes() as pair:
        yield Nodes(pair)
