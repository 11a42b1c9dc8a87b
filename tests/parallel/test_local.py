"""``flags`` makes the same tensor on its device as ``torch.tensor`` makes from the list."""

from __future__ import annotations

import pytest
import torch

from launcher.parallel.mesh import flags

CPU = torch.device("cpu")


@pytest.mark.parametrize("each", [[], [True], [False, True, True], [False, False]])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_marks_are_those_of_the_list(each: list[bool], dtype: torch.dtype) -> None:
    assert torch.equal(flags(each, CPU, dtype), torch.tensor(each, dtype=dtype))
