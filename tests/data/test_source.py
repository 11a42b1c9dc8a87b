"""The interface that every reader offers."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.data.source import entropy
from launcher.data.tokens.windows import Windows


def test_entropy_is_that_of_the_targets():
    assert entropy(Windows(np.array([9, 0, 1, 0, 1]), 2)) == pytest.approx(np.log(2))
    assert entropy(Windows(np.array([9, 0, 0, 3, 1]), 4)) == pytest.approx(1.5 * np.log(2))
    assert entropy(Windows(np.array([9, 4, 4]), 1)) == 0
    assert entropy(Windows(np.array([9]), 1)) is None
