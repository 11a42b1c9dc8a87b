"""A model class that a user wrote."""

from __future__ import annotations

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.models import ModelTarget
from launcher.models.build import build_model
from launcher.parallel.deferred_init.constructor import record
from launcher.parallel.deferred_init.replay import replay
from launcher.parallel.dispatch.modes import default_dtype
from tests.parallel.constructors import Float32Buffers
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


def test_float32_buffers_of_arrays_and_lists_are_recorded_in_float64_as_their_double_is():
    """``model.double()`` gives the recorded tensor itself another dtype."""
    settings = ModelTarget(_target_="tests.parallel.constructors.Float32Buffers")
    with default_dtype(torch.float64):
        model, tape = record(lambda: build_model(settings, allow=("tests",)))
    assert tape.why == ""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, want in Float32Buffers().double().state_dict().items():
        made = replay(tape.log, named.get(name, model.numbers), name, 0)
        assert made.dtype == want.dtype, name
        assert torch.equal(made, want), name
