"""``train.ema``: weights whose precision would lose the average."""

from __future__ import annotations

from dataclasses import replace

from launcher.plan.resolve.weight_average import param_problems
from launcher.plan.values.tensor_spec import TensorSpec
from tests.plan.cut.test_tensor_placement import laid, sizes
from tests.plan.made import chain, job, skeleton

MODEL = skeleton({"a.weight": (4,), "b.weight": (4,)}, frozen=["b.weight"])


def test_trained_weights_in_half_precision_are_refused_and_frozen_ones_are_not():
    params, _ = laid(MODEL, chain("a", "b"), {"a": 0, "b": 0}, sizes(), None)
    low = [replace(p, spec=TensorSpec(p.spec.shape, "bfloat16")) for p in params]
    averaged = job("train.ema={}")
    assert [str(p) for p in param_problems(averaged, low)] == [
        "train.ema: a.weight is kept in bfloat16, which rounds away what a step adds to an average; keep the weights "
        "that are trained in fp32 (try: train.ema=null)"
    ]
    assert not [*param_problems(averaged, [params[0], low[1]])]
    assert not [*param_problems(job(), low)]
