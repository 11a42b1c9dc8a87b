"""Stages that are equal except for names are recorded, searched and measured once; the plan is that of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from launcher.extras.device_matrix import onto_plan
from launcher.extras.device_matrix.run import measure_stage
from launcher.extras.device_matrix.run.record_equal_modules import StageCode
from launcher.extras.device_matrix.search import explore
from launcher.extras.device_matrix.show import sharding_rows
from launcher.plan.show.plan_json import as_json
from launcher.planner.plan_job import plan_job
from tests.plan.made import job
from tests.tiers import some_of

STAGES = "embed: 0, layers.0: 0, layers.1: 0, layers.2: 1, layers.3: 1, layers.4: 2, layers.5: 2, layers.6: 3"
LM = ("recipe=lm_recursive", "model.layers=9", "launch.nproc=8", "parallel.pipeline.micro_batch_num=4",
      f"parallel.pipeline.stage_config={{{STAGES}, layers.7: 3, layers.8: 3, norm: 3, head: 3}}")  # fmt: skip
JOBS = {
    "uneven": (3, (*LM, "parallel.pipeline.stages=4")),
    "interleaved": (3, ("recipe=lm_recursive", "model.layers=8", "parallel.pipeline.interleave=true")),
    "written": (3, (*LM, "parallel.pipeline.stages=4", "parallel.mode=sharding_propagation",
                    "+parallel.operators={layers.1.attn.q: {in: [[1, 1, 1], [2, 1]]}}")),
}  # fmt: skip
"""The number of recorded stages, and the request."""


class _Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("name", some_of(JOBS))
def test_the_plan_is_that_of_each_stage_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, overrides = JOBS[name]
    works = [(onto_plan, "_recorded"), (explore, "propagate"), (measure_stage, "measure_stage")]
    counts = {name: _Counted(getattr(module, name)) for module, name in works}
    for module, work in works:
        monkeypatch.setattr(module, work, counts[work])
    together = plan_job(job(*overrides))
    once = {work: count.calls for work, count in counts.items()}

    monkeypatch.setattr(StageCode, "names_of", lambda self, other: None)
    monkeypatch.setattr(explore, "unnamed", lambda graph: object())
    monkeypatch.setattr(measure_stage, "_nameless", lambda stage, kept: (object(),))
    alone = plan_job(job(*overrides))
    assert alone.sharding == together.sharding
    assert as_json(alone) == as_json(together)
    assert once["_recorded"] == recorded
    assert {work: count.calls - once[work] for work, count in counts.items()} == dict.fromkeys(counts, 4)


COLUMNS = "{matrix: [2], axes: [x], in: [[null,null,null],[x,null]]}"
CUT = "parallel.pipeline.stage_config={embed: 0, layers.0: 0, layers.1: 0, layers.2: 1, layers.3: 1, norm: 1, head: 1}"
SENT = {
    "layers.*.attn.q": "each stage: 2 all-gathers, 12 all-to-alls, 2 reduce-scatters a micro batch, 5.0 MB received a "
    "rank, predicted 212.4 ms at 10.0 ms a collective and 0.1 GB/s",
    "layers.1.attn.q": "most on stage 0: 1 all-gather, 6 all-to-alls, 1 reduce-scatter a micro batch, 2.5 MB received "
    "a rank, predicted 106.2 ms at 10.0 ms a collective and 0.1 GB/s",
}


@pytest.mark.parametrize("name", SENT)
def test_traffic_is_shown_once_for_equal_stages_and_as_the_largest_for_others(name: str) -> None:
    made = plan_job(
        job(
            "recipe=lm_recursive", "parallel.mode=semi_auto", "model.tied=false", CUT,
            f"+parallel.operators={{{name}: {COLUMNS}}}",
            "parallel.comm_fusion.network={latency_us: 10000, gb_per_s: 0.1}",
        )
    )  # fmt: skip
    assert [text for _, text in sharding_rows(made.sharding)][-1] == SENT[name]


def test_of_equal_layers_of_several_stages_one_line_says_what_was_inferred() -> None:
    made = plan_job(job("recipe=lm_recursive"))
    assert made.sharding is not None
    assert made.sharding.reasons[2] == "inferred: layers.*.attn.q (4): batch, saves an all-gather of 512.0 KB"
    assert len(set(made.sharding.reasons)) == len(made.sharding.reasons) == 17


class _Scaled(nn.Linear):
    def __init__(self, by: float) -> None:
        super().__init__(4, 4)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


def _code(model: nn.Module, units: Sequence[str]) -> StageCode:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for unit in units:
        x = graph.call_module(unit, (x,))
    graph.output(x)
    return StageCode.from_graph(model, graph, [torch.empty(2, 4, device="meta")])


def _chain(*by: float) -> nn.Module:
    return nn.Sequential(*map(_Scaled, by)).to("meta")


def test_a_different_python_number_makes_a_stage_different() -> None:
    model = _chain(1, 2, 1, 2, 1, 1)
    first = _code(model, ["0", "1"])
    assert first.names_of(_code(model, ["2", "3"])) == {"0": "2", "1": "3"}
    assert first.names_of(_code(model, ["4", "5"])) is None


def test_a_tie_a_hook_or_a_frozen_weight_makes_a_stage_different() -> None:
    model = _chain(*[1] * 10)
    model[3].weight = model[2].weight
    model[5].weight.requires_grad_(False)
    model[7].register_forward_hook(lambda module, args, out: out * 2)
    first = _code(model, ["0", "1"])
    assert first.names_of(_code(model, ["8", "9"])) == {"0": "8", "1": "9"}
    for units in (["2", "3"], ["4", "5"], ["6", "7"]):
        assert first.names_of(_code(model, units)) is None


def test_an_additional_call_makes_a_stage_different() -> None:
    model = _chain(*[1] * 4)
    assert _code(model, ["0", "1"]).names_of(_code(model, ["2", "3", "2"])) is None
