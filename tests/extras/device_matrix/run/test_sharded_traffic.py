"""Over device matrices, too, the collectives of a real step are those in the plan: count and bytes, on every rank."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from launcher.job.schema.job import Job
from tests.extras.device_matrix.run.test_device_matrices import DOCUMENT, DRAWN, SHAPES, drawn, network
from tests.parallel.counting import assert_all_as_planned
from tests.parity import own
from tests.tiers import some


def with_micros(job: Job, count: int) -> Job:
    par = job.parallel
    cut = par.pipeline.model_copy(update={"micro_batch_num": count})
    return job.model_copy(update={"parallel": par.model_copy(update={"pipeline": cut})})


@pytest.mark.parametrize("net", SHAPES)
def test_operators_cut_at_random_send_what_is_planned(net: str) -> None:
    """The jobs have all levels of hsdp, and one stage or two; the transformer ties its head to its embedding."""
    seeds = some(range(1, DRAWN), one_in=20)
    assert_all_as_planned({seed: with_micros(drawn(net, seed), 1 + (seed % 3 == 1)) for seed in seeds})


def test_a_slice_of_a_gathered_weight_is_gathered_again() -> None:
    """A slice is a view that keeps the memory of the full tensor: here of the embedding, for the tied head."""
    assert_all_as_planned({23: drawn("Transformer", 23)})


def test_the_first_document_s_network_takes_so_many_collectives() -> None:
    plan = assert_all_as_planned({0: network("Document", 8, operators=DOCUMENT)})[0]
    counts = {t.kind: t.count for t in plan.estimate.traffic if t.rank == 0}
    assert counts == {
        "all_gather": 2,
        "reduce_scatter": 1,
        "all_reduce": 4,
        "all_to_all": 3,
    }  # one of them reduces scalars


NETS: dict[str, tuple[list[Any], dict[str, list[list[str | None]]]]] = {
    "Norms": ([[8]], {"batch": [["x", "y"]], "layer": [["x", "y"]], "rms": [["x", "y"]]}),
    "Softmaxes": ([[8]], {name: [["x", "y"]] for name in ("soft", "still", "log", "sum", "narrow")}),
    "Losses": ([[8], ["int64"]], {
        name: [["x", "y"]] for name in ("log", "plain", "added", "each", "soft", "weighted", "nll")
    }),
}  # fmt: skip
"""Inputs, and how operators split their first tensor."""
INNER_NETS = "tests.extras.device_matrix.run.inner_nets"
MATRICES = {
    "both": {"matrix": [2, 2], "axes": ["x", "y"]},
    "samples": {"matrix": [4, 1], "axes": ["x", "y"]},
    "classes": {"matrix": [1, 4], "axes": ["x", "y"]},
}
BOTH = MATRICES["both"]
LAST = {"in": [["x", None], ["y", None], ["y"]]}


@pytest.mark.parametrize("net", NETS)
def test_collectives_inside_of_operators_and_of_the_loss_are_planned(net: str) -> None:
    shapes, takes = NETS[net]
    jobs = {}
    for name, matrix in MATRICES.items():
        operators = {key: matrix | {"in": dims} for key, dims in takes.items()} | {"last": matrix | LAST}
        made = own(f"{INNER_NETS}.{net}", *shapes, stages=1, train__batch_size=16, launch__nproc=4)
        parallel = made.parallel.model_copy(update={"operators": operators})
        jobs[name] = made.model_copy(update={"parallel": parallel})
    assert_all_as_planned(jobs)


CUT: dict[str, Any] = {
    "fc1": {"matrix": [2], "axes": ["x"], "in": [["x", None], [None, None], [None]]},
    "relu1": {"matrix": [2], "axes": ["x"], "in": [[None, "x"]]},
    "fc2": {"matrix": [2], "axes": ["x"], "in": [[None, "x"], [None, "x"]]},
    "fc3": {"matrix": [2], "axes": ["x"], "in": [[None, None], ["x", None], ["x"]]},
}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": 2, "micro_batch_num": 4},
    "interleaved": {
        "stages": 2, "micro_batch_num": 4, "interleave": True,
        "stage_config": {"flatten": 0, "fc1": 0, "relu1": 1, "fc2": 1, "relu2": 2, "fc3": 3},
    },
}  # fmt: skip


LEVELS = ("level1", "level2", "level3")


def test_a_level_gathers_and_reduces_as_often_as_planned() -> None:
    """Once per step or once per micro batch.

    Weights in half precision are kept, and their gradients are summed in fp32.
    """
    jobs = {}
    for name, precision, level in some(product(PIPELINES, ("fp64", "bf16"), LEVELS)):
        hsdp = {"threshold": 0, "optimizer_level": level}
        made = network("Mlp", 4, 2, operators=CUT, hsdp=hsdp, pipeline=PIPELINES[name])
        said = made.model_dump(by_alias=True)
        said["train"] |= {"precision": precision}
        jobs[name, precision, level] = Job.model_validate(said)
    assert_all_as_planned(jobs)


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_values_without_a_gradient_send_no_gradient(level: str) -> None:
    made = own(f"{INNER_NETS}.HalfIdle", [8], stages=1, train__batch_size=16, launch__nproc=4)
    rows = BOTH | {"in": [["x", "y"], [None, "y"]]}
    operators = {"first": rows, "branch": rows, "last": BOTH | LAST}
    said = made.model_dump(by_alias=True)
    said["parallel"] |= {"operators": operators, "hsdp": {"threshold": 0, "optimizer_level": level}}
    assert_all_as_planned({level: Job.model_validate(said)})
