"""Models that draw random numbers in training.

The plan says where losses depend on the layout, and what cannot be certified.
"""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.parity import job
from tests.steps.certified import STAGES, TWO, of

OWN = (
    "attend: draws random numbers in training, from a separate stream for each "
    "stage and data-parallel rank: another layout"
)


def notes(key: str, parallel: dict[str, Any], **changes: Any) -> list[str]:
    asked = job(parallel=parallel, **{**of("DropsAttentionInside"), **changes})
    return [n.text for n in plan_job(asked).notes if n.key == key]


@pytest.mark.parametrize("parallel", [TWO, STAGES], ids=["replicas", "stages"])
def test_losses_that_depend_on_the_layout_are_said(parallel):
    assert notes("seed", parallel) == [f"{OWN} gives other losses"]
    assert notes("seed", parallel, model={"_target_": "tests.steps.nets.Net"}) == []


def test_one_process_draws_from_one_stream():
    assert notes("seed", {}) == []


def test_the_certificate_says_what_it_does_about_draws():
    said = notes("steps.certify", TWO, steps={"certify": {"kind": "certify"}})
    text = "the certificate makes draws depend only on the shape, so each layout draws the same numbers"
    assert said[1:] == [f"attend: {text}"]


def test_draws_in_compiled_code_cannot_be_certified():
    steps: dict[str, Any] = {"certify": {"kind": "certify"}}
    with pytest.raises(RequestError) as refused:
        notes("seed", TWO, steps=steps, train__compile={"backend": "aot_eager"})
    assert str(refused.value) == (
        "steps.certify: attend draws random numbers in compiled code, so two trainings cannot be compared; draw "
        "in a torch.nn.Dropout module, which the certificate turns off, or leave out the certify step"
    )
