"""A stage as a load of memory."""

from __future__ import annotations

from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.plan import ask, leaves, plan
from tests.plan.made import chain, job, skeleton

MODEL = skeleton({"a.weight": (4, 4), "b.weight": (4, 4)})
MICROS, MESSAGE, SAVED = 8, 32, 8  # bytes: a message between the stages, and what each stage saves


def activation_bytes(keeps_messages: bool) -> list[int]:
    """Return the bytes of activations on each of two ranks, with two micro batches in flight."""
    j = job("launch.nproc=2", "parallel.pipeline.stages=2", f"parallel.pipeline.micro_batch_num={MICROS}")
    asked = ask(j)
    traced = TracedModel(MODEL, chain("a", "b"), leaves(asked, MODEL), keeps_messages=keeps_messages)
    return [m.activations for m in plan(j, asked, traced).estimate.memory]


def test_messages_are_counted_as_long_as_torch_keeps_them() -> None:
    first, last = activation_bytes(keeps_messages=True)
    first_less, last_less = activation_bytes(keeps_messages=False)
    assert first == MICROS * 2 * MESSAGE + 2 * SAVED
    assert first_less == 2 * (MESSAGE + SAVED) + MESSAGE
    assert last - last_less == (MICROS - 1) * MESSAGE
