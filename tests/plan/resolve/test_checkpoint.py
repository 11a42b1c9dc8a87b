"""Names that checkpoints need for themselves."""

from __future__ import annotations

from launcher.plan.resolve.checkpoint import misnamed
from launcher.plan.values.model_graph import ModelStructure, Param
from launcher.plan.values.tensor_spec import TensorSpec


def problem_texts(*names: str, trainable: bool = True, device: str = "auto") -> list[str]:
    params = tuple(Param(n, TensorSpec((2,), "float32"), n, trainable) for n in names)
    return [p.text for p in misnamed(ModelStructure((), params, frozenset()), device)]


def test_a_weight_with_the_name_of_another_ones_state_is_refused():
    text = "optim.exp_avg.a.w has the name that checkpoints use for optimizer state of a.w, and would overwrite it"
    assert problem_texts("a.w", "optim.exp_avg.a.w") == [f"{text}; rename its module"]


def test_a_buffer_with_the_name_of_a_random_stream_is_refused():
    text = "has the name that checkpoints use for a random stream, and would overwrite it"
    cpu, numpy, npu = (f"rng.{kind} {text}; rename its module" for kind in ("cpu", "numpy", "npu"))
    assert problem_texts("a.w", "rng.cpu") == [cpu]
    assert problem_texts("a.w", "rng.numpy", "rng.npu", device="npu") == [numpy, npu]
    assert problem_texts("a.w", "rng.npu", device="cpu") == []


def test_names_that_only_look_alike_are_not_refused():
    assert problem_texts("a.w", "optim.a.w", "optim.exp_avg.b.w", "rng.table", "my.optim.exp_avg.a.w") == []


def test_names_of_untrained_parameters_cannot_collide_with_states():
    assert problem_texts("a.w", "optim.exp_avg.a.w", trainable=False) == []
