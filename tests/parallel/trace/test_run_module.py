"""What a module returns to Python must not depend on data where the code around the module runs once."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.trace.run_module import zeros
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.model import build_session
from tests.parity import assert_parity, own
from tests.ranks import DRAWN, on_ranks

CUT = {"a": 0, "head": 1}
TEXT = (
    "parallel.pipeline.stage_config: cannot trace the code between the named modules of {}: a returns {} for other "
    "data; return a tensor of a fixed shape; name a larger module in stage_config, so that this code runs inside it"
)
REFUSED = {"Summed": "another Python number", "Counted": "another Python number", "Picked": "tensors of another shape"}
REFUSED["SummedUnderAutocast"] = REFUSED["Summed"]


@pytest.mark.parametrize("net", list(REFUSED))
def test_python_values_that_depend_on_data_are_refused_on_stages(net):
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"returned_nets.{net}", [6], stages=CUT))
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == TEXT.format(net, REFUSED[net])


@pytest.mark.parametrize("net", list(REFUSED))
def test_a_module_that_returns_python_values_is_planned_on_one_stage(net):
    plan_job(own(f"returned_nets.{net}", [6], stages={"*": 0}))


def test_numbers_that_are_the_same_for_any_data_are_exact():
    assert_parity(own("returned_nets.Sized", [6], stages=CUT))


def sentences(net: str, inner: str, stages: dict[str, int]) -> Job:
    """A job for one of ``length_nets``, with data whose lengths differ."""
    model = {"_target_": f"tests.parallel.length_nets.{net}", "inner": inner}
    data = {"_target_": "tests.parallel.length_nets.Sentences"}
    return own(f"length_nets.{net}", ["int64", 6], ["int64"], stages=stages, model=model, data=data)


@pytest.mark.parametrize(
    "job",
    [
        sentences("Net", "Packed", {"*": 0}),
        sentences("Net", "Last", {"*": 0}),
        sentences("Net", "Trimmed", {"*": 0}),
        sentences("Stacked", "Packed", {"*": 0}),
        sentences("Counted", "Masked", {"*": 0}),
        own("length_nets.Scaled", [6], stages={"*": 0}),
        sentences("Net", "Last", {"embed": 0, "inner": 0, "mix": 1, "head": 1}),
    ],
)
def test_a_model_that_fails_on_zeros_is_planned_with_the_first_samples(job):
    plan_job(job)


@pytest.mark.parametrize(("net", "inner"), [("Net", "Packed"), ("Net", "Trimmed"), ("Counted", "Masked")])
def test_a_shape_that_hangs_on_lengths_of_the_data_is_refused_between_stages(net, inner):
    with pytest.raises(RequestError) as refused:
        plan_job(sentences(net, inner, {"embed": 0, "inner": 0, "mix": 1, "head": 1}))
    want = TEXT.format(net, "tensors of another shape").replace(
        "modules of " + net + ": a ", f"modules of {net}: inner "
    )
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == want


def rank_loss(world: World, j: Job, plan: Plan, folder: Path) -> float:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    return loop.step(s, None)[0]


def test_ranks_of_stages_try_the_first_samples_too(tmp_path: Path) -> None:
    """Each of them traces the forward again; zeros are no lengths."""
    one, two = (sentences("Net", "Last", {"embed": 0, "inner": 0, "mix": n, "head": n}) for n in (0, 1))
    alone, over_stages = (on_ranks(n, rank_loss, j, plan_job(j), tmp_path / str(n)) for n, j in ((1, one), (2, two)))
    assert over_stages[1] == pytest.approx(alone[0], rel=1e-12)


def test_a_module_with_an_operator_without_a_fake_runs_on_values() -> None:
    assert_parity(own("container_nets.Fakeless", [6], stages={"[ab]": 0, "c": 1}))


def test_layers_that_share_their_dictionary_of_tensors_stay_tied_to_these_only():
    layers = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(40))
    for layer in layers[1::2]:
        layer._parameters, layer._buffers = layers[0]._parameters, layers[0]._buffers
    made = zeros(layers)
    assert len({id(t) for t in made.parameters()}) == 2 * 20
    assert len({id(t) for t in made.buffers()}) == 3 * 20
    assert [t.shape for t in made.buffers()] == [(3,), (3,), ()] * 20


def test_large_weights_of_a_model_that_reads_values_take_no_memory_before_they_are_written() -> None:
    from launcher.parallel.model_state.deep_copy import on_meta

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1 << 20, 128, dtype=torch.bfloat16), nn.Linear(2, 3))
        model[0].register_buffer("table", torch.ones(1 << 20, 128))
    before = resident()
    real = zeros(model)
    assert {t.device.type for t in (*real.parameters(), *real.buffers())} == {"cpu"}
    assert real[0].weight.dtype == torch.bfloat16
    assert real[0].weight.requires_grad
    assert not real[0](torch.tensor([1 << 19])).any()
    other = on_meta(real)
    assert {t.device.type for t in (*other.parameters(), *other.buffers())} == {"meta"}
    assert other[0].weight.requires_grad
    assert resident() - before < 100 << 20
