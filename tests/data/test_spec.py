"""Shapes known without opening a file."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from launcher.data.open import open_data
from launcher.data.spec import classes, input_specs, target_spec, vocab
from launcher.errors import RequestError
from launcher.job.schema.data import Cifar10, Idx, Mnist5k, RandomTokens, Text, Tokens
from launcher.job.schema.user_class import Target
from launcher.plan.values.tensor_spec import TensorSpec
from tests.data.sample_files import write_cifar, write_idx
from tests.data.token_bytes import own

TEXT = Text(name="text", seq_len=16)
DIGITS = Mnist5k(name="mnist5k")


@pytest.fixture
def every(tmp_path):
    write_idx(tmp_path / "idx", "")
    write_cifar(tmp_path / "cifar", "binary")
    (tmp_path / "a.tokens").write_bytes(own(list(range(100))))
    return [
        TEXT,
        RandomTokens(name="random_tokens", vocab_size=9, seq_len=5),
        Tokens(name="tokens", path=str(tmp_path / "a.tokens"), seq_len=5),
        DIGITS,
        Mnist5k(name="mnist5k", size=32, channels=3),
        Idx(name="idx", root=str(tmp_path / "idx"), size=6),
        Cifar10(name="cifar10", root=str(tmp_path / "cifar")),
        Cifar10(name="cifar10", root=str(tmp_path / "none"), fallback="mnist5k"),
    ]


def spec(t: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))


def test_samples_have_the_shapes_and_dtypes_that_the_spec_states(every):
    for settings in every:
        train = open_data(settings, seed=0).train
        rows = np.array([1, 0, 1])
        assert tuple(map(spec, train.inputs(rows))) == input_specs(settings, 3)
        assert spec(train.targets(rows)) == target_spec(settings, 3)


def test_numbers_of_tokens_and_classes():
    bpe = Text(name="text", tokenizer="bpe", vocab_size=700)
    idx, cifar = Idx(name="idx", root="x"), Cifar10(name="cifar10", root="x")
    assert [vocab(s) for s in (TEXT, bpe, DIGITS, idx, cifar)] == [256, 700, None, None, None]
    assert [classes(s) for s in (TEXT, bpe, DIGITS, idx, cifar)] == [256, 700, 10, None, 10]


def test_a_users_data_class_is_built_for_each_split_and_gives_its_specs():
    mine, allow = Target(_target_="tests.data.own.Ramp", samples=5), ("tests",)
    data = open_data(mine, seed=0, allow=allow)
    assert (len(data.train), len(data.val)) == (5, 1)
    assert input_specs(mine, 7, allow) == (TensorSpec((7, 4), "float16"), TensorSpec((7,), "int64"))
    assert target_spec(mine, 7, allow) == TensorSpec((7, 1), "int64")


def test_a_class_of_the_users_own_without_samples_is_refused():
    with pytest.raises(RequestError) as refused:
        input_specs(Target(_target_="tests.data.own.Ramp", samples=0), 7, ("tests",))
    assert str(refused.value) == (
        "data: tests.data.own.Ramp: its split train has no samples, so there is nothing to train on; "
        "its len() must be the number of samples"
    )


def test_a_class_that_is_no_source_is_refused():
    with pytest.raises(RequestError) as refused:
        open_data(Target(_target_="torch.nn.Linear"), seed=0, allow=("torch",))
    kinds = "is not a Source, nor a Dataset or IterableDataset of torch"
    assert str(refused.value) == f"data._target_: torch.nn.Linear: {kinds}"


def test_specs_and_checks_of_data_import_no_torch():
    code = (
        "import sys\n"
        "import launcher.data.spec, launcher.data.shuffle, launcher.data.checks\n"
        "import launcher.models.defaults, launcher.optim.schedule\n"
        "from launcher.job.schema.components import Mnist5k, Text\n"
        "from launcher.data.spec import input_specs\n"
        "for data in (Text(name='text'), Mnist5k(name='mnist5k')):\n"
        "    assert launcher.data.checks.check(data) == []\n"
        "    input_specs(data, 2)\n"
        "assert 'torch' not in sys.modules and 'hydra' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
