"""What an act is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(act: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """The whole message; the exception is of this very type."""
    with pytest.raises(kind) as caught:
        act()
    assert caught.type is kind
    return str(caught.value)
