"""The message with which an act is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(act: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """The full message of the exception, which has exactly the type ``kind``."""
    with pytest.raises(kind) as caught:
        act()
    assert caught.type is kind
    return str(caught.value)
