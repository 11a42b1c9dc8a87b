"""What a run leaves in the global variables of a model's files is restored."""

from __future__ import annotations

import itertools
import random
import sys
from array import array
from collections import OrderedDict, UserDict
from collections.abc import MutableMapping
from contextvars import ContextVar
from functools import cache, partial
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from launcher.parallel.model_state.module_globals import GlobalsSnapshot, files, files_of, put_back, variables
from launcher.parallel.model_state.python_state import changed
from tests.parallel import kept_elsewhere, library_nets
from tests.parallel import python_state_nets as nets
from tests.parity.zoo import case
from tests.parity.zoo.models import grad_modes


def test_variables_and_what_they_hold_are_put_back():
    own_files = files(nets.Net)
    assert own_files == [nets.__name__]
    nets.KEPT = {"list": [1, nets.Box()], "array": np.ones(2)}
    try:
        before = variables(own_files)
        with put_back(own_files):
            nets.KEPT["list"][1].steps[0] = 5
            nets.KEPT["list"].append(2)
            nets.KEPT["array"][0] = 7
            nets.NEW, nets.Numbered.more, nets.CALLS = 1, 2, -1
            assert len(changed(before, variables(own_files))) == 6
        assert not changed(before, variables(own_files))
    finally:
        del nets.KEPT


def _imports_everything(*_: object) -> NoReturn:
    raise ImportError("this mapping makes its values as they are read, and one of them cannot be made")


READS = ("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "get", "items", "keys", "values")
LAZY = dict.fromkeys(READS, _imports_everything)


@pytest.mark.parametrize("base", [dict, OrderedDict, UserDict, MutableMapping])
def test_a_lazy_mapping_is_read_without_its_own_methods_and_put_back(base: Any) -> None:
    writes = dict.fromkeys(("__setitem__", "__delitem__", "clear", "update", "pop"), _imports_everything)
    lazy: Any = type("Lazy", (base,), {**LAZY, **writes, "__init__": lambda self: None, "__module__": nets.__name__})()
    lazy.count = [0]
    if isinstance(lazy, dict):
        base.__setitem__(lazy, "first", 1)
    nets.KEPT = lazy
    try:
        before = variables([nets.__name__])
        with put_back([nets.__name__]):
            lazy.count[0] = 5
            lazy.more = 1
            if isinstance(lazy, dict):
                base.__setitem__(lazy, "second", 2)
            assert len(changed(before, variables([nets.__name__]))) == 2 + isinstance(lazy, dict)
        assert not changed(before, variables([nets.__name__]))
        assert (lazy.count, hasattr(lazy, "more")) == ([0], False)
        if isinstance(lazy, dict):
            assert [*base.items(lazy)] == [("first", 1)]
    finally:
        del nets.KEPT


def test_transformers_is_nobodys_own_code_wherever_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = ModuleType("transformers.models.llama.modeling_llama")
    clone.__file__ = "/home/me/transformers/src/transformers/models/llama/modeling_llama.py"
    monkeypatch.setitem(sys.modules, clone.__name__, clone)
    assert files(type("Net", (), {"__module__": clone.__name__})) == []


class Slots:
    __slots__ = ("__own", "late", "n")

    def __init__(self) -> None:
        self.n = self.__own = 0

    def step(self) -> list[int]:
        self.n, self.__own, self.late = self.n + 1, self.__own + 2, 1
        return [self.n, self.__own]


def _counting() -> Any:
    class Inner:
        n = 0

    def step() -> int:
        Inner.n += 1
        return Inner.n

    step.__module__ = Inner.__module__ = nets.__name__
    return step


@cache
def _cell() -> list[int]:
    return [0]


def _stepped(cell: list[int]) -> int:
    cell[0] += 1
    return cell[0]


_cell.__module__ = Slots.__module__ = nets.__name__
VARIABLE = ContextVar("VARIABLE", default=0)
KINDS: dict[str, tuple[Any, Any]] = {
    "random": (random.Random(1), lambda v: v.random()),
    "numpy": (np.random.default_rng(1), lambda v: v.random()),
    "numpy, legacy": (np.random.RandomState(1), lambda v: v.rand()),
    "torch": (torch.Generator().manual_seed(1), lambda v: torch.rand((), generator=v).item()),
    "count": (itertools.count(), next),
    "cycle": (itertools.cycle([1, 2, 3]), next),
    "iterator": (iter([1, 2, 3]), next),
    "bytes": (bytearray(1), lambda v: v.append(1) or len(v)),
    "array": (array("d", [0.0]), lambda v: v.append(1) or len(v)),
    "slots": (Slots(), lambda v: v.step()),
    "class in a function": (_counting(), lambda v: v()),
    "context": (VARIABLE, lambda v: v.set(v.get() + 1) and v.get()),
    "cache": (_cell, lambda v: _stepped(v())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_goes_on_from_where_it_was(kind: str) -> None:
    nets.KEPT, step = KINDS[kind]
    try:
        with put_back([nets.__name__]):
            first = step(nets.KEPT), step(nets.KEPT)
        assert first[0] != first[1]
        assert (step(nets.KEPT), step(nets.KEPT)) == first
    finally:
        del nets.KEPT


def test_a_cache_that_had_results_keeps_them() -> None:
    nets.KEPT = _cell
    try:
        cell = _cell()
        before = [*cell]
        with put_back([nets.__name__]):
            _stepped(cell)
        assert _cell() is cell
        assert cell == before
    finally:
        del nets.KEPT


def test_files_of_functions_that_a_model_was_given_are_its_own_and_tensors_in_them_are_put_back() -> None:
    net = library_nets.Given(partial(kept_elsewhere.calls, 0.1))
    assert kept_elsewhere.__name__ not in files(type(net))
    names = files_of(net)
    assert kept_elsewhere.__name__ in names
    with put_back(names):
        before = variables(names)
        net(torch.zeros(2, 6))
        kept = [f"{kept_elsewhere.__name__}.{name}" for name in ("CALLS", "TENSOR")]
        assert [name for name, _ in changed(before, variables(names))] == kept
    assert (kept_elsewhere.CALLS, kept_elsewhere.TENSOR.item()) == (0, 0)


def test_only_what_the_models_code_can_call_is_followed_through_its_imports() -> None:
    """The file of the zoo's cases also has functions that import all models, which no forward calls."""
    plain = grad_modes.Plain
    assert files_of(plain()) == [plain.__module__, case.__name__]


def test_an_iterator_can_be_put_back_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "KEPT", itertools.count(5), raising=False)
    before = GlobalsSnapshot([nets.__name__])
    for _ in range(2):
        assert next(nets.KEPT) == 5
        before.restore()
