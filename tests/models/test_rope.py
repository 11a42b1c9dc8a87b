"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from launcher.models.rope import angles, rotate


@pytest.mark.parametrize(("dtype", "kept", "error"), [("float64", "float64", 1e-12), ("float32", "float32", 4e-8),
                                                     ("bfloat16", "float32", 4e-8)], ids=str)  # fmt: skip
def test_rotary_angles_are_exact_far_into_a_sequence(dtype, kept, error):
    cos, sin = angles(9000, 16, 10000.0, torch.empty(0, dtype=getattr(torch, dtype)))
    assert cos.dtype == sin.dtype == getattr(torch, kept)
    want = np.outer(np.arange(9000), 10000.0 ** (-np.arange(0, 16, 2) / 16))
    np.testing.assert_allclose(cos.double().numpy(), np.cos(want), rtol=0, atol=error)
    np.testing.assert_allclose(sin.double().numpy(), np.sin(want), rtol=0, atol=error)


def test_a_rotated_product_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).expand(2, 12, 8)
    cos, sin = angles(12, 8, 10000.0, q)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).mT
    for distance in range(12):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_worked_out_in_fp32_at_least(dtype):
    assert angles(3, 4, 10000.0, torch.empty(0, dtype=dtype))[0].dtype == torch.float32
    x = torch.randn(3, 4, dtype=dtype)
    assert rotate(x, *angles(3, 4, 10000.0, x)).dtype == dtype
