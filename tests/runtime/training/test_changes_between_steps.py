"""A value that a callback or a schedule sets, and that not all computations of a layout would see, ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from launcher.parallel.model_state.variables_read import OutsideChanges, variables_of_loss, variables_of_model
from launcher.runtime.training.changes_between_steps import ChangesBetweenSteps, NotSeenByAll
from tests.runtime.training import outside_nets
from tests.runtime.training.outside_nets import SEEN, STATE, Loss, Net, Scaled


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Loss, "weight", None)
    monkeypatch.setattr(Scaled, "scale", 1.0)
    yield
    STATE.update(share=0.0, calls=0)
    SEEN.clear()


def compared(net: Net, ranks: int, stages: int, everywhere: bool = False) -> AbstractContextManager[None]:
    reads = [variables_of_model(net, ("a", "b", "scaled") if stages > 1 else None), variables_of_loss(Loss)]
    changes = OutsideChanges(reads, [*net.modules()])
    return ChangesBetweenSteps(changes, ranks, stages).compared("Sets.on_step", everywhere)


SETS: dict[str, tuple[Callable[[Net], object], str]] = {
    "a variable": (lambda net: STATE.update(share=0.5), f"{outside_nets.__name__}.STATE"),
    "an attribute of the loss": (lambda net: setattr(Loss, "weight", 2.0), f"{outside_nets.__name__}.Loss.weight"),
    "an attribute of a class": (lambda net: setattr(Scaled, "scale", 2.0), f"{outside_nets.__name__}.Scaled.scale"),
    "an attribute of the model": (lambda net: setattr(net, "room", 2.0), "room of Net"),
    "a flag of a weight": (lambda net: net.a.requires_grad_(False), "requires_grad of parameters"),
}


@pytest.mark.parametrize("what", SETS)
def test_a_value_that_is_set_on_one_of_several_ranks_ends_the_run(what: str) -> None:
    act, place = SETS[what]
    net = Net()
    with pytest.raises(NotSeenByAll) as error, compared(net, ranks=2, stages=1):
        act(net)
    text = f"Sets.on_step has set {place}, which a forward or the loss uses, on rank 0 only"
    cure = "set every_rank = True in the class: then each rank creates it and calls its hooks"
    assert str(error.value) == f"{text}: the other ranks would train with the old value; {cure}"


@pytest.mark.parametrize("what", SETS)
@pytest.mark.parametrize(("ranks", "everywhere"), [(1, False), (2, True)], ids=["one rank", "every rank"])
def test_a_value_that_all_ranks_set_is_used(what: str, ranks: int, everywhere: bool) -> None:
    net = Net()
    with compared(net, ranks, stages=1, everywhere=everywhere):
        SETS[what][0](net)


def test_what_no_forward_uses_may_be_set() -> None:
    net = Net()
    with compared(net, ranks=2, stages=2):
        SEEN.append(1.0)
        outside_nets.Samples.size = 3  # type: ignore[attr-defined]


def test_code_that_was_recorded_does_not_see_a_new_value() -> None:
    net = Net()
    with pytest.raises(NotSeenByAll) as error, compared(net, ranks=2, stages=2, everywhere=True):
        STATE["share"] = 0.5
    text = f"Sets.on_step has set {outside_nets.__name__}.STATE, which the code between the model's modules uses"
    why = "with 2 stages this code was recorded with the old value"
    cure = "use the value in the forward of a module that is on one stage, or train with one stage"
    assert str(error.value) == f"{text}; {why}; {cure}"


def test_a_module_on_a_stage_sees_a_new_value() -> None:
    net = Net()
    with compared(net, ranks=2, stages=2, everywhere=True):
        Scaled.scale = 3.0
