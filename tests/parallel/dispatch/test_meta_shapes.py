"""A cached result of an operation on meta tensors equals the computed one."""

from __future__ import annotations

import pytest
import torch

from launcher.parallel.dispatch import meta_shapes
from launcher.parallel.dispatch.modes import tree_leaves, tree_map_only

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS = {
    "broadcast": lambda: (aten.mul.Tensor, (meta(2, 3), meta(3))),
    "an int beside": lambda: (aten.add.Tensor, (meta(2, dtype=torch.int64), 1)),
    "a float beside": lambda: (aten.add.Tensor, (meta(2, dtype=torch.int64), 1.0)),
    "a bool beside": lambda: (aten.add.Tensor, (meta(2, dtype=torch.int64), True)),
    "transposed": lambda: (aten.neg.default, (meta(2, 3).t(),)),
    "several results": lambda: (aten.native_layer_norm.default, (meta(2, 3), [3], meta(3), meta(3), 1e-5)),
    "a list of tensors": lambda: (aten.cat.default, ([meta(2, 3), meta(1, 3)],)),
    "a dtype": lambda: (aten._to_copy.default, (meta(2, 3), {"dtype": torch.float64})),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_cached_result_equals_the_computed_one(name):
    func, args = CALLS[name]()
    kwargs = args[-1] if isinstance(args[-1], dict) else {}
    args = args[:-1] if kwargs else args
    want = func(*args, **kwargs)
    for _ in range(2):
        got = meta_shapes.run_cached(func, args, kwargs)
        assert type(got) is type(want)
        for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("func", [aten.view.default, aten.reshape.default], ids=str)
def test_views_are_made_each_time(func):
    for _ in range(2):
        x = meta(2, 3)
        assert meta_shapes.run_cached(func, (x, [6]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_an_operation_that_returns_its_input_returns_it_again():
    for _ in range(2):
        x = meta(2)
        with torch.inference_mode():
            assert meta_shapes.run_cached(aten.dropout.default, (x, 0.5, False), {}) is x


def test_the_default_dtype_counts():
    x = meta(2, dtype=torch.int64)
    single = meta_shapes.run_cached(aten.div.Tensor, (x, 2), {}).dtype
    torch.set_default_dtype(torch.float64)
    try:
        double = meta_shapes.run_cached(aten.div.Tensor, (x, 2), {}).dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert (single, double) == (torch.float32, torch.float64)


def test_an_error_is_raised_again():
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            meta_shapes.run_cached(aten.add.Tensor, (meta(2), meta(3)), {})


def test_results_that_are_not_on_the_meta_device_are_computed():
    assert meta_shapes.run_cached(aten.add.Tensor, (torch.ones(2), 1), {}).tolist() == [2.0, 2.0]
    assert meta_shapes.run_cached(aten.add.Tensor, (torch.ones(2), 2), {}).tolist() == [3.0, 3.0]


def test_tree_functions_agree_with_those_of_torch():
    from collections import OrderedDict, namedtuple

    from torch.utils import _pytree

    pair = namedtuple("pair", "a b")
    tree = ([1, (2.0, None)], {"x": pair(torch.zeros(1), "s"), "y": OrderedDict(z=slice(1, 2))}, torch.Size([3]))
    assert list(map(id, tree_leaves(tree))) == list(map(id, _pytree.tree_leaves(tree)))
    assert tree_map_only(int, lambda n: n + 1, tree)[0] == _pytree.tree_map_only(int, lambda n: n + 1, tree)[0]
    assert type(tree_map_only(int, lambda n: n + 1, tree)[1]["x"]) is pair
