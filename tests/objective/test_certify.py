"""The certificate computes every loss with its own code, and reports a run whose loss differs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from launcher.job.schema.steps import Certify
from launcher.objective.losses import ClassLoss, ElementLoss
from launcher.objective.user_defined import OwnLoss
from tests.objective.test_parity import HEAD, HOLED, OWN, VALUES
from tests.steps.certified import REPLICAS, SHARDED, certificate
from tests.tiers import some

TP = {"operators": HEAD, "grid": {"tp": 2}}
SMOOTH: dict[str, Any] = {"name": "cross_entropy", "label_smoothing": 0.2, "z_loss": 0.1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], type]] = {
    "cross entropy, tp": (TP, SMOOTH, HOLED, ClassLoss),
    "cross entropy, replicas": (REPLICAS, SMOOTH | {"ignore_index": 3}, HOLED | {"hole": 3}, ClassLoss),
    "mse, level3": (SHARDED, {"name": "mse"}, VALUES, ElementLoss),
    "bce, tp": (TP, {"name": "bce"}, VALUES, ElementLoss),
    "own, replicas": (REPLICAS, {"_target_": f"{OWN}.Weighted"}, HOLED, OwnLoss),
}


def settings_of_case(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    parallel, loss, data, _ = CASES[case]
    more = {"loss": loss, "data": data | {"samples": 40}, "security__allow": ("tests",), "model__layers": 2}
    return parallel, more | {"model__tied": parallel is not TP, "train__batch_size": 16}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_certificate_of_every_loss_holds(case: str, precision: Literal["fp64", "fp32", "bf16"]) -> None:
    parallel, more = settings_of_case(case)
    c = certificate(parallel, Certify(precision=precision), **more, train__precision=precision)
    assert c.holds, c.verdict()


@pytest.mark.parametrize("case", some(CASES))
def test_the_certificate_reports_a_loss_that_differs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, more = settings_of_case(case)
    kind = CASES[case][3]
    real = kind.__call__

    def wrong(self: Any, output: Tensor, target: Tensor, *parts: Any) -> Tensor:
        made: Tensor = real(self, output, target, *parts)
        return made + 1e-9 * torch.tanh(made)

    monkeypatch.setattr(kind, "__call__", wrong)
    assert "step 1: the loss: " in certificate(parallel, **more).verdict()
