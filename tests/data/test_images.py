"""Readers of images."""

from __future__ import annotations

import gzip
import io
import pickle

import numpy as np
import pytest
import torch

from launcher.data import cifar
from launcher.data.files import mnist5k
from launcher.data.images import Images
from launcher.data.open import open_data
from launcher.errors import RequestError
from launcher.job.schema.components import Cifar10, Idx, Mnist5k
from tests.data.files import FORMS, cifar_images, write_cifar, write_idx


def test_pixels_are_padded_with_black_then_normalised_then_repeated():
    source = Images(np.full((1, 1, 2, 3), 255, np.uint8), np.array([4]), 6, 2, (0.5,), (0.25,))
    (x,) = source.inputs(np.array([0]))
    want = torch.full((6, 6), -2.0)
    want[2:4, 1:4] = 2.0
    assert torch.equal(x, want.expand(1, 2, 6, 6))
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    assert torch.equal(source.targets(np.array([0])), torch.tensor([4]))


def test_colours_are_normalised_each_by_its_own_numbers():
    source = Images(np.full((1, 3, 1, 1), 51, np.uint8), np.zeros(1), 1, 3, (0.0, 0.2, 0.4), (1.0, 0.5, 0.1))
    torch.testing.assert_close(source.inputs(np.array([0]))[0].flatten(), torch.tensor([0.2, 0.0, -2.0]))


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


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, suffix):
    pixels, labels = write_idx(tmp_path, suffix)
    data = open_data(Idx(name="idx", root=str(tmp_path), size=8, channels=3), seed=0)
    assert (len(data.train), len(data.val)) == (6, 2)
    (x,) = data.train.inputs(np.arange(6))
    assert x.shape == (6, 3, 8, 8)
    np.testing.assert_allclose(x[:, 1, 2:6, 2:6], pixels / 127.5 - 1, rtol=0, atol=1e-6)
    assert data.train.targets(np.array([5, 0])).tolist() == labels[[5, 0]].tolist()


def test_the_plain_idx_file_goes_before_the_gzipped_one(tmp_path):
    write_idx(tmp_path, ".gz", seed=1)
    pixels, _ = write_idx(tmp_path, "", seed=2)
    data = open_data(Idx(name="idx", root=str(tmp_path), size=4), seed=0)
    assert isinstance(data.train.pixels, np.memmap)
    assert np.array_equal(data.train.pixels[:, 0], pixels)


@pytest.mark.parametrize("folder", ["", "archive"])
@pytest.mark.parametrize("form", FORMS)
def test_cifar10_is_read_in_both_forms_where_it_was_unpacked_or_one_folder_up(tmp_path, form, folder):
    root = tmp_path / FORMS[form] if folder else tmp_path
    write_cifar(root, form)
    data = open_data(Cifar10(name="cifar10", root=str(tmp_path)), seed=0)
    pixels, labels = cifar_images()
    assert np.array_equal(data.train.pixels, pixels[:10])
    assert np.array_equal(data.val.pixels, pixels[10:])
    assert data.train.targets(np.arange(10)).tolist() == labels[:10].tolist()
    assert data.val.inputs(np.arange(2))[0].shape == (2, 3, 32, 32)


def test_a_pickle_that_calls_a_function_is_refused_and_the_function_is_not_called(tmp_path):
    class Evil:
        def __reduce__(self):
            return eval, (f"open({str(tmp_path / 'called')!r}, 'w')",)

    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}, protocol=2))
    with pytest.raises(RequestError) as refused:
        cifar.read_pickle(file)
    assert not (tmp_path / "called").exists()
    assert str(refused.value) == (
        f"data.root: {file}: not a CIFAR-10 batch: __builtin__.eval is not allowed; fetch the archive again"
    )


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({b"labels": [1]}, "no dictionary with data and labels"),
        ([1, 2], "no dictionary with data and labels"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "data is uint8 (2, 3072) for 1 labels"),
        ({b"data": np.zeros((1, 3072), np.int64), b"labels": [1]}, "data is int64 (1, 3072) for 1 labels"),
    ],
    ids=["no data", "a list", "labels missing", "wrong type"],
)
def test_a_pickle_of_something_else_is_refused_by_name(tmp_path, batch, why):
    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(RequestError) as refused:
        cifar.read_pickle(file)
    assert str(refused.value) == (f"data.root: {file}: not a CIFAR-10 batch: {why}; fetch the archive again")


def test_an_encoding_other_than_the_one_for_bytes_is_refused(tmp_path):
    file = tmp_path / "data_batch_1"
    file.write_bytes(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.")
    with pytest.raises(RequestError) as refused:
        cifar.read_pickle(file)
    why = "encoding 'rot13' is not allowed"
    assert str(refused.value) == f"data.root: {file}: not a CIFAR-10 batch: {why}; fetch the archive again"


def test_idx_gz_and_plain_hold_the_same(tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    write_idx(plain, "")
    write_idx(packed, ".gz")
    for file in plain.iterdir():
        with gzip.open(packed / f"{file.name}.gz") as stream:
            assert io.BytesIO(stream.read()).getvalue() == file.read_bytes()
