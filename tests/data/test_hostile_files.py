"""The plan refuses malformed files of strangers before a rank reads them."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest

from launcher.data import text_tokenizer
from launcher.data.file_kinds import BadFile
from launcher.extras.images import cifar_files


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_a_pickle_that_names_something_else_is_refused_and_not_built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}, protocol=2))
    with pytest.raises(BadFile) as caught:
        cifar_files.check_complete(file, binary=False)
    assert str(caught.value) == "not a CIFAR-10 batch: posix.mkdir is not allowed"
    file.write_bytes(b"noise, then a stop.")
    with pytest.raises(BadFile, match="not a pickle of plain data"):
        cifar_files.check_complete(file, binary=False)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_a_complete_cifar_batch_is_accepted_in_every_pickle_protocol(tmp_path, protocol):
    file = tmp_path / "data_batch_1"
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}
    file.write_bytes(pickle.dumps(batch, protocol=protocol))
    cifar_files.check_complete(file, binary=False)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}))
    with pytest.raises(ValueError, match="not a tokenizer: it has no tokens"):
        text_tokenizer.load(file)
