"""An optimizer's state as tensors of a checkpoint, and the conversion back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from launcher.optim.state_packing import pack, unpack, unpackable

numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
values = st.recursive(numbers, lambda v: st.lists(v, max_size=3) | st.lists(v, max_size=3).map(tuple), max_leaves=6)
keys = st.sampled_from(["step", "_k", "list", "none", "int", "d0", "params", "exp_avg"])


def made() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.zeros(2, 3))
    return p, torch.optim.SGD([p], lr=0.1)


def like(a: Any, b: Any) -> bool:
    """Whether both are equal and all nested types are the same."""
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(like, a, b))
    return type(a) is type(b) and a == b


@given(st.dictionaries(keys, values), st.dictionaries(st.sampled_from(["k", "d", "late"]), values))
def test_numbers_lists_and_nothing_come_back_as_they_were(state, counters):
    (p, optimizer), (q, other) = made(), made()
    if state:
        optimizer.state[p] = dict(state)
    optimizer.param_groups[0] |= counters
    packed = pack(optimizer, p, counters)
    assert unpackable(optimizer, p, counters) == []
    assert all(t.ndim == 0 for t in packed.values())
    unpack(other, q, {name: t.clone() for name, t in packed.items()})
    assert like(sorted(other.state.get(q, {})), sorted(state))
    assert all(like(other.state[q][key], value) for key, value in state.items())
    assert all(like(other.param_groups[0][key], value) for key, value in counters.items())


def test_tensors_are_the_state_itself():
    p, optimizer = made()
    mean, scale = torch.ones(2, 3), torch.tensor(2.0)
    optimizer.state[p] = {"mean": mean, "history": [mean, scale]}
    packed = pack(optimizer, p)
    assert list(packed) == ["mean", "history/list", "history/0", "history/1"]
    assert packed["mean"] is packed["history/0"] is mean


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"mode": "warm"}, ["mode of type str"]),
        ({"big": 2**63}, ["big of type int"]),
        ({"deep": [1, (2, {3})]}, ["deep of type set"]),
        ({"a.b": 1}, ["a.b of type int, under a key that is not a plain name"]),
        ({3: 1.0}, ["3 of type float, under a key that is not a plain name"]),
        ({"thin": torch.eye(2).to_sparse()}, ["thin of type Tensor (sparse_coo, float32)"]),
        ({"wide": torch.zeros(1, dtype=torch.complex128)}, ["wide of type Tensor (strided, complex128)"]),
    ],
)
def test_state_that_a_checkpoint_cannot_store_is_named_and_left_out(state, said):
    p, optimizer = made()
    optimizer.state[p] = state
    assert unpackable(optimizer, p) == said
    assert pack(optimizer, p) == {}
