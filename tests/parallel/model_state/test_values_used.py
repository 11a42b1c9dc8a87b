"""Which names a forward's code uses, and which it only stores and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher.parallel.model_state import values_used

WATCHED: Any = {}
PHASE: Any = {}
TOTAL = 0
NAMES = frozenset({"WATCHED", "PHASE", "TOTAL", "watched", "phase", "calls", "CALLS"})


def store(me: Any, x: Tensor) -> Tensor:
    WATCHED["rms"] = x.detach().pow(2).mean().sqrt().item()
    return x


def default(me: Any, x: Tensor) -> Tensor:
    WATCHED.setdefault(me.calls, []).append(x.mean())
    return x


def imported(me: Any, x: Tensor) -> Tensor:
    from tests.parallel.carried_elsewhere import CALLS as n

    n["n"] += 1
    return x * n["n"]


def deep(me: Any, x: Tensor) -> Tensor:
    WATCHED["a"][me.name].append((me.phase, float(x.mean())))
    return x


def count(me: Any, x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    me.calls, me.watched = me.calls + 1, max(me.watched, x.max().item())
    if me.calls % 10 == 0 and TOTAL > 3:
        print("calls", me.calls, TOTAL)
        WATCHED.update(step=me.calls)
    return x


def maximum(me: Any, x: Tensor) -> Tensor:
    most = x.max().item()
    if most > me.watched:
        me.watched = most
    return x / most


def hooked(me: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda g: me.watched.append(g.norm().item()))
    return x


def tried(me: Any, x: Tensor) -> Tensor:
    try:
        return x
    finally:
        WATCHED["time"] += 1


def window(me: Any, x: Tensor) -> Tensor:
    seen = me.watched
    seen["last"] = me.calls
    return x


def returned(me: Any, x: Tensor) -> Tensor:
    return x * me.calls  # type: ignore[no-any-return]


def condition(me: Any, x: Tensor) -> Tensor:
    if me.calls > 3:
        x = x * 2
    return x


def leaves_early(me: Any, x: Tensor) -> Tensor:
    if me.calls > 3:
        return x * 2
    return x


def flag(me: Any, x: Tensor) -> Tensor:
    me.calls += 1
    if me.calls == 4:
        PHASE["main"] = True
    return x * 2 if PHASE else x


def through_alias(me: Any, x: Tensor) -> Tensor:
    seen = PHASE
    seen["n"] = me.calls
    return x * PHASE["n"]  # type: ignore[no-any-return]


def through_parts(me: Any, x: Tensor) -> Tensor:
    me.watched.append(PHASE)
    me.watched[0]["n"] = me.calls
    return x * PHASE["n"]  # type: ignore[no-any-return]


def through_own_function(me: Any, x: Tensor) -> Tensor:
    keep(me.calls)
    return x


def keep(value: int) -> None:
    WATCHED["n"] = value


def through_own_print(me: Any, x: Tensor) -> Tensor:
    me.info(me.calls)
    return x


def info(me: Any, value: int) -> None:
    PHASE["n"] = value


def added(me: Any, x: Tensor) -> Tensor:
    return torch.add(x, me.calls)


def appended(me: Any, x: Tensor) -> Tensor:
    return x.new_tensor(np.append([1.0], me.calls))


def in_place(me: Any, x: Tensor) -> Tensor:
    x.add_(me.calls)
    return x


def written_by(me: Any, x: Tensor) -> Tensor:
    torch.add(x, me.calls, out=x)
    return x


def by_name(me: Any, x: Tensor) -> Tensor:
    return x * getattr(me, "calls")  # type: ignore[no-any-return]  # noqa: B009


@dataclass
class Settings:
    calls: int = 0

    def forward(self, x: Tensor) -> Tensor:
        return x


def used_of(*functions: Any) -> frozenset[str]:
    return values_used.values_used(functions) & NAMES


@pytest.mark.parametrize(
    ("forward", "used"),
    [
        (store, ""), (default, ""), (imported, "CALLS"),
        (deep, ""), (count, ""), (maximum, ""), (hooked, ""), (tried, ""), (window, ""),
        (returned, "calls"), (condition, "calls"), (leaves_early, "calls"), (flag, "PHASE calls"),
        (through_alias, "PHASE calls"), (through_parts, "PHASE calls watched"), (through_own_function, "calls"),
        (added, "calls"), (appended, "calls"), (in_place, "calls"), (written_by, "calls"), (by_name, "calls"),
    ],
)  # fmt: skip
def test_a_name_is_used_if_its_value_reaches_more_than_a_store(forward: Callable[..., Tensor], used: str) -> None:
    assert used_of(forward) == {*used.split()}


def test_a_function_of_the_user_may_use_what_it_is_given() -> None:
    assert used_of(through_own_print) == set()
    assert used_of(through_own_print, info) == {"calls"}


def test_what_one_function_stores_and_another_one_uses_is_used() -> None:
    assert used_of(store) == set()
    assert used_of(store, lambda: WATCHED["rms"]) == {"WATCHED"}


def test_all_names_of_a_function_without_source_are_used() -> None:
    space: dict[str, Any] = {}
    exec("def forward(me, x):\n    WATCHED['a'] = me.calls\n    return x", space)
    assert used_of(space["forward"]) == {"WATCHED", "calls"}
    generated = [vars(Settings)[name] for name in ("__init__", "__repr__", "__eq__")]
    assert used_of(*generated, Settings.forward) == set()
