"""Pixels as normalized tensors."""

from __future__ import annotations

import numpy as np
import torch

from launcher.data.image_source import Images


def test_pixels_are_padded_with_black_then_normalized_then_repeated():
    source = Images(np.full((1, 1, 2, 3), 255, np.uint8), np.array([4]), 6, 2, (0.5,), (0.25,))
    (x,) = source.inputs(np.array([0]))
    want = torch.full((6, 6), -2.0)
    want[2:4, 1:4] = 2.0
    assert torch.equal(x, want.expand(1, 2, 6, 6))
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    assert torch.equal(source.targets(np.array([0])), torch.tensor([4]))


def test_colors_are_normalized_each_by_its_own_numbers():
    source = Images(np.full((1, 3, 1, 1), 51, np.uint8), np.zeros(1), 1, 3, (0.0, 0.2, 0.4), (1.0, 0.5, 0.1))
    torch.testing.assert_close(source.inputs(np.array([0]))[0].flatten(), torch.tensor([0.2, 0.0, -2.0]))
