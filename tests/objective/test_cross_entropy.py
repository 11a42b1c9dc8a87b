"""The loss."""

from __future__ import annotations

import pytest
import torch

from launcher.objective.losses import cross_entropy


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=["classes", "tokens"])
def test_cross_entropy_is_the_mean_over_all_positions(shape):
    logits = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.arange(6).view(shape[:-1]) % 5
    want = -logits.log_softmax(-1).gather(-1, target[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, target), want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_worked_out_in_fp32(dtype):
    logits = torch.randn(4, 5).to(dtype)
    target = torch.tensor([0, 1, 2, 3])
    assert torch.equal(cross_entropy(logits, target), cross_entropy(logits.float(), target))


def test_fp64_stays_fp64_and_the_result_has_no_dims():
    loss = cross_entropy(torch.randn(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert (loss.dtype, loss.shape) == (torch.float64, ())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_where_nothing_counts_the_sum_and_its_gradients_are_zero(dtype):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    loss = cross_entropy(logits, torch.full((2, 3), -100), reduction="sum")
    (loss / 7 * 65536).backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_holes_count_for_nothing():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([[1, -100, 3], [-100, -100, 0]])
    some = cross_entropy(torch.stack([logits[0, 0], logits[0, 2], logits[1, 2]]), torch.tensor([1, 3, 0]))
    torch.testing.assert_close(cross_entropy(logits, target), some, rtol=1e-14, atol=0)
    torch.testing.assert_close(cross_entropy(logits, target, reduction="sum"), 3 * some, rtol=1e-14, atol=0)
