"""The loss."""

from __future__ import annotations

import pytest
import torch

from launcher.models.loss import cross_entropy


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=["classes", "tokens"])
def test_it_is_the_mean_over_all_positions(shape):
    logits = torch.randn(shape, dtype=torch.float64)
    target = torch.arange(6).view(shape[:-1]) % 5
    want = -logits.log_softmax(-1).gather(-1, target[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, target), want, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_worked_out_in_fp32(dtype):
    logits = torch.randn(4, 5).to(dtype)
    target = torch.tensor([0, 1, 2, 3])
    assert torch.equal(cross_entropy(logits, target), cross_entropy(logits.float(), target))


def test_fp64_stays_fp64_and_the_result_has_no_dims():
    loss = cross_entropy(torch.randn(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert (loss.dtype, loss.shape) == (torch.float64, ())
