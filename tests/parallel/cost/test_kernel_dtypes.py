"""The plan refuses the dtypes that real kernels refuse; meta kernels do not check them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.parallel.cost.kernels import ForwardMeter


def ones(*shape: int, wide: bool = False) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64 if wide else torch.float32)


def first() -> Tensor:
    return torch.zeros(1, dtype=torch.long)


OPERATIONS = {
    "mm": lambda w: ones(2, 2) @ ones(2, 2, wide=w),
    "addmm": lambda w: F.linear(ones(2, 2), ones(2, 2, wide=w), ones(2)),
    "addmm in place": lambda w: ones(2, 2).addmm_(ones(2, 2), ones(2, 2, wide=w)),
    "mv": lambda w: ones(2, 2) @ ones(2, wide=w),
    "convolution": lambda w: F.conv2d(ones(1, 1, 3, 3), ones(1, 1, 2, 2, wide=w)),
    "transposed convolution": lambda w: F.conv_transpose1d(ones(1, 1, 3), ones(1, 1, 2, wide=w)),
    "layer_norm": lambda w: F.layer_norm(ones(2, 2), (2,), ones(2, wide=w)),
    "group_norm": lambda w: F.group_norm(ones(2, 2), 1, ones(2, wide=w)),
    "batch_norm": lambda w: F.batch_norm(ones(4, 2), ones(2), ones(2), ones(2, wide=w), ones(2), True),
    "index_add": lambda w: ones(2, 2).index_add(0, first(), ones(1, 2, wide=w)),
    "index_copy": lambda w: ones(2, 2).index_copy(0, first(), ones(1, 2, wide=w)),
    "index_put": lambda w: ones(2, 2).index_put((first(),), ones(1, 2, wide=w)),
    "cross_entropy": lambda w: F.cross_entropy(ones(1, 2), first(), ones(2, wide=w)),
    "binary_cross_entropy": lambda w: F.binary_cross_entropy(ones(2), ones(2, wide=w)),
    "cdist": lambda w: torch.cdist(ones(2, 2), ones(2, 2, wide=w)),
    "grid_sample": lambda w: F.grid_sample(ones(1, 1, 2, 2), ones(1, 2, 2, 2, wide=w), align_corners=False),
}


@pytest.mark.parametrize("wide", [False, True], ids=["one dtype", "two dtypes"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_plan_notes_what_this_machine_refuses(name, wide):
    try:
        OPERATIONS[name](wide)
    except RuntimeError:
        refused = True
    else:
        refused = False
    assert refused == wide
    with torch.device("meta"), ForwardMeter(()) as meter:
        OPERATIONS[name](wide)
    assert bool(meter.disagree) == wide


def test_it_names_the_operation_the_dtypes_and_the_line():
    line = first.__code__.co_firstlineno + 5
    with torch.device("meta"), ForwardMeter(()) as meter:
        OPERATIONS["mm"](True)
    assert meter.disagree == (f"mm of float32 and float64 (test_kernel_dtypes.py:{line})",)


def test_a_norm_of_narrow_numbers_may_have_wide_weights():
    with torch.device("meta"), ForwardMeter(()) as meter:
        F.layer_norm(ones(2, 2).bfloat16(), (2,), ones(2), ones(2))
    assert meter.disagree == ()


def test_under_autocast_the_dtypes_are_torchs_to_choose():
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), ForwardMeter(()) as meter:
        ones(2, 2).bfloat16() @ ones(2, 2)
    assert meter.disagree == ()
