"""CIFAR-10, and pickles that contain something else."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from launcher.data.open import open_data
from launcher.errors import RequestError
from launcher.extras.images import cifar_pickles
from launcher.job.schema.data import Cifar10
from tests.data.sample_files import FORMS, cifar_images, write_cifar


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
        cifar_pickles.read_pickle(file)
    assert not (tmp_path / "called").exists()
    assert str(refused.value) == (
        f"data.root: {file}: not a CIFAR-10 batch: __builtin__.eval is not allowed; fetch the archive again"
    )


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({b"labels": [1]}, "not a dictionary with data and labels"),
        ([1, 2], "not a dictionary with data and labels"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "data is uint8 (2, 3072) for 1 labels"),
        ({b"data": np.zeros((1, 3072), np.int64), b"labels": [1]}, "data is int64 (1, 3072) for 1 labels"),
    ],
    ids=["no data", "a list", "labels missing", "wrong type"],
)
def test_a_pickle_of_something_else_is_refused_by_name(tmp_path, batch, why):
    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(RequestError) as refused:
        cifar_pickles.read_pickle(file)
    assert str(refused.value) == (f"data.root: {file}: not a CIFAR-10 batch: {why}; fetch the archive again")


def test_an_encoding_other_than_the_one_for_bytes_is_refused(tmp_path):
    file = tmp_path / "data_batch_1"
    file.write_bytes(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.")
    with pytest.raises(RequestError) as refused:
        cifar_pickles.read_pickle(file)
    why = "encoding 'rot13' is not allowed"
    assert str(refused.value) == f"data.root: {file}: not a CIFAR-10 batch: {why}; fetch the archive again"
