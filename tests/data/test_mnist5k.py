"""The 5000 MNIST digits."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.data import mnist5k
from launcher.data.open import open_data
from launcher.job.schema.data import Mnist5k


def test_mnist5k_is_5000_real_digits_500_a_class():
    pixels, labels = mnist5k.read(mnist5k.where())
    assert pixels.shape == (5000, 1, 28, 28)
    assert np.bincount(labels).tolist() == [500] * 10
    assert pixels.mean() / 255 == pytest.approx(0.1307, abs=0.003)


def test_mnist5k_holds_out_the_same_digits_for_every_seed():
    a, b = (open_data(Mnist5k(name="mnist5k", val_fraction=0.2), seed=s) for s in (0, 1))
    assert (len(a.train), len(a.val)) == (4000, 1000)
    everything = np.concatenate([a.train.pixels, a.val.pixels]).reshape(5000, -1)
    assert len(np.unique(everything, axis=0)) == len(np.unique(mnist5k.read(mnist5k.where())[0], axis=0))
    assert np.array_equal(a.val.pixels, b.val.pixels)
    assert a.entropy == pytest.approx(np.log(10), abs=0.01)
    (x,) = a.train.inputs(np.arange(500))
    assert float(x.mean()) == pytest.approx(0, abs=0.05)
    assert float(x.std()) == pytest.approx(1, abs=0.05)
