"""What ``debug.graphs`` shows of stages, compared with the model that they were cut from."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.run.plan_pictures import pictures
from tests.parity import job

SVG = "{http://www.w3.org/2000/svg}"
TEXT = """\
stage 1 of 2 on rank 1: 8 calls
Shapes, FLOPs of the forward and bytes saved for the backward are for one micro batch on one rank.

  value   made by           inputs     shape           weights  FLOPs  saved
  a       received stage 0             float32[4, 12]
  relu    received stage 0             float32[4, 12]
  c       module c          relu       float32[4, 12]  624 B    1.2k
  mul     glue mul          c          float32[4, 12]  48 B            192 B
  add     glue add          mul, a     float32[4, 12]
  add_1   glue add          add, relu  float32[4, 12]
  d       module d          add_1      float32[4, 10]  520 B    960    192 B
  output  output            d          float32[4, 10]

The tensors of this stage, and the part that each rank keeps:

  s         float32[12]      full on each rank
  c.weight  float32[12, 12]  full on each rank
  c.bias    float32[12]      full on each rank
  d.weight  float32[10, 12]  full on each rank
  d.bias    float32[10]      full on each rank
"""


class Skips(nn.Module):
    """Two values skip modules, and one of them crosses the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(784, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.s = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x.flatten(1))
        y = self.b(x).relu()
        return self.d(self.c(y) * self.s + x + y)


class Untraceable(nn.Module):
    """Its code between modules reads values of tensors, which a stage cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(784, 12), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x.flatten(1))
        return self.b(x) if float(x.sum()) > 0 else self.b(-x)


def planned(model: type[nn.Module], stages: int, **more: object) -> Plan:
    config = {"a": 0, "b": 0, "c": 1, "d": 1, "s": 1} if stages > 1 else "auto"
    return plan_job(
        job(
            model={"_target_": f"{__name__}.{model.__name__}"},
            data={"name": "mnist5k", "size": 28},
            train__batch_size=8,
            train__precision="fp32",
            parallel__pipeline={"stages": stages, "stage_config": config},
            launch__nproc=stages,
            debug__graphs=True,
            security__allow=["tests"],
            **more,
        )
    )


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return pictures(planned(Skips, 2))


def test_the_text_has_each_call_and_each_tensor(found: dict[str, str]) -> None:
    assert found["graphs/stage1.txt"] == TEXT
    first = found["graphs/stage0.txt"]
    assert "a        module a      flatten  float32[4, 12], sent on" in first
    assert "relu     glue relu     b        float32[4, 12], sent on" in first


def test_the_picture_has_a_box_a_call_and_an_arrow_a_use(found: dict[str, str]) -> None:
    root = ElementTree.fromstring(found["graphs/stage1.svg"])
    boxes = list(root.iter(f"{SVG}g"))
    assert [g.find(f"{SVG}text").text for g in boxes] == [
        "a from stage 0", "relu from stage 0", "c", "mul", "add", "add", "d", "output",
    ]  # fmt: skip
    tops = [float(g.find(f"{SVG}rect").get("y")) for g in boxes]
    assert all(below - above > 40 for above, below in pairwise(tops))

    # six from box to box; the two that skip modules have lanes of their own
    arrows = [p.get("d") for p in root.iter(f"{SVG}path") if p.get("marker-end")]
    beside = [d for d in arrows if "H" in d]
    assert (len(arrows), len(beside)) == (8, 2)
    assert len({d.split("H")[1].split("V")[0] for d in beside}) == 2

    # what stage 0 sends goes to a box of its own, from both values
    first = ElementTree.fromstring(found["graphs/stage0.svg"])
    assert [t.text for t in first.iter(f"{SVG}text")][-1] == "to stage 1"
    assert len([p for p in first.iter(f"{SVG}path") if p.get("marker-end")]) == 6


def test_of_one_stage_the_modules_that_could_be_cut() -> None:
    text = pictures(planned(Skips, 1))["graphs/stage0.txt"]
    assert text.startswith("stage 0 of 1 on rank 0: 11 calls\n")
    assert "  add_1    glue add      add, relu  float32[8, 12]" in text


def test_where_code_cannot_be_followed_the_order_of_modules() -> None:
    found = pictures(planned(Untraceable, 1))
    assert found["graphs/stage0.txt"].splitlines()[1:6] == [
        "The code between the modules could not be traced: the modules are listed in the order in which they run.",
        "",
        "  value  made by   inputs  shape  weights  FLOPs  saved",
        "  a      module a                 36.8 KB         24.5 KB",
        "  b      module b                 520 B           384 B",
    ]
    assert found["graphs/stage0.svg"].count("marker-end") == 1


def test_unasked_nothing_is_drawn() -> None:
    assert not [name for name in pictures(plan_job(job())) if name.startswith("graphs")]
