"""torch's flex_attention cannot be planned: the refusal says so and names an alternative."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.parity import own


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        out = flex_attention(q, k, v)
        assert isinstance(out, Tensor)
        return out.squeeze(1)


class Net(nn.Module):
    """Attention between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), _Attention(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


@pytest.mark.parametrize("stages", [1, 2])
def test_flex_attention_is_refused_with_what_to_use(stages: int) -> None:
    data: dict[str, Any] = {"_target_": "tests.parallel.sources.Shapes", "shapes": [[4, 6]], "target": [4]}
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"{__name__}.Net", [4, 6], stages=stages, data=data))
    assert "in b (_Attention) (test_flex_attention.py:" in str(refused.value)
    assert str(refused.value).endswith(
        ": flex_attention cannot run on tensors without values, which a plan has, and torch has no backward of it on a "
        "CPU; use torch.nn.functional.scaled_dot_product_attention, with a mask"
    )
