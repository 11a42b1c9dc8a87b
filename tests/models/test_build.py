"""A model class that a user wrote."""

from __future__ import annotations

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.models import ModelTarget
from launcher.models.build import build_model
from launcher.parallel.dispatch.modes import default_dtype
from tests.parallel.named_dtype_nets import Named


def test_a_class_of_an_allowed_package_is_built_on_the_default_device():
    with torch.device("meta"):
        model = build_model(ModelTarget(_target_="torch.nn.Linear", in_features=3, out_features=4), allow=("torch",))
    assert tuple(model.weight.shape) == (4, 3)
    assert model.weight.is_meta


def test_a_class_that_is_no_module_is_refused():
    with pytest.raises(RequestError) as refused:
        build_model(ModelTarget(_target_="torch.optim.SGD"), allow=("torch",))
    assert str(refused.value) == "model._target_: torch.optim.SGD: is not a Module class"


def test_a_model_that_names_dtypes_is_built_in_float64_as_its_double_is():
    settings = ModelTarget(_target_="tests.parallel.named_dtype_nets.Named")
    with default_dtype(torch.float64):
        model = build_model(settings, allow=("tests",))
    assert {n: t.dtype for n, t in model.state_dict().items()} == {
        n: t.dtype for n, t in Named().double().state_dict().items()
    }
    assert model.last.weight is model.tied.weight
    assert build_model(settings, allow=("tests",)).first.low.dtype == torch.bfloat16
