"""Each loss trains the weights of plain torch in every layout, and metrics are those of the full batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.job.schema.job import Job
from launcher.parallel.deferred_init import fill
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.certification.compare import Piece, error, pieces
from launcher.steps.model import build_session, evaluate_in_one_process
from tests.parallel.sources import Holed, Measured
from tests.parity import job, plain, whole
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some

SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
HEAD: dict[str, Any] = {"head": {"weight": ["tp", None]}}
UP: dict[str, Any] = {"layers.*.mlp.up": {"weight": ["tp", None], "output": [None, None, None]}}
MATRIX: dict[str, Any] = {"head": {"matrix": [2], "axes": ["x"], "in": [[None, None, None], ["x", None]]}}
ROWS: dict[str, Any] = {"head": {"matrix": [2], "axes": ["x"], "in": [["x", None, None], [None, None]]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "level1": {"hsdp": SHARD},
    "level3": {"pipeline": {"micro_batch_num": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "pp2 x 2 replicas": {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}},
    "seqpipe": {"pipeline": {"stages": 2, "micro_batch_num": 2, "seq_chunks": 2, "scheduler": "seqpipe"}},
    "tp2": {"operators": UP, "grid": {"tp": 2}},
    "tp2, output cut": {"pipeline": {"micro_batch_num": 2}, "operators": HEAD, "grid": {"tp": 2}},
    "matrix, output cut": {"operators": MATRIX, "grid": {"tp": 2}},
    "matrix, samples cut": {"operators": ROWS, "grid": {"tp": 2}},
}
OWN = "tests.objective.own"
HOLED: dict[str, Any] = {"_target_": "tests.parallel.sources.Holed", "seq_len": 8}
VALUES: dict[str, Any] = {"_target_": "tests.parallel.sources.Measured", "seq_len": 8, "target": [8, 64]}
CLASSED = ["accuracy", {"name": "top_k", "k": 3}, "perplexity"]
Values = tuple[Tensor, Tensor]
STEPS = 3


def smooth(output: Tensor, y: Tensor) -> Tensor:
    flat, y = output.flatten(0, -2), y.flatten()
    logs = flat.logsumexp(-1)[y != -100]
    return F.cross_entropy(flat, y, label_smoothing=0.1) + 0.01 * logs.square().mean()


def elsewhere(output: Tensor, y: Tensor) -> Tensor:
    """Class 7 does not count, and every other class does."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), ignore_index=7)


def weighted(output: Tensor, y: Tensor) -> Tensor:
    weight = 1 + torch.arange(64, dtype=torch.float64) * 0.1
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), weight=weight)


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "smooth": ({"label_smoothing": 0.1, "z_loss": 0.01, "name": "cross_entropy"}, HOLED, CLASSED, smooth),
    "ignore_index": (
        {"name": "cross_entropy", "ignore_index": 7}, HOLED | {"hole": 7}, [*CLASSED, {"_target_": f"{OWN}.Holes"}],
        elsewhere,
    ),
    "mse": ({"name": "mse"}, VALUES, [{"_target_": f"{OWN}.AbsError"}], F.mse_loss),
    "bce": ({"name": "bce"}, VALUES, [], F.binary_cross_entropy_with_logits),
    "own": ({"_target_": f"{OWN}.Weighted"}, HOLED, [*CLASSED, {"_target_": f"{OWN}.Holes"}], weighted),
}  # fmt: skip


def jobs(layout: str) -> dict[str, Job]:
    """A job for each loss; a loss that takes full outputs is left out if outputs are sharded over ``tp``."""
    out = {}
    for name, (loss, data, metrics, _) in LOSSES.items():
        if layout == "tp2, output cut":
            metrics = [m for m in metrics if "_target_" not in m]
            if name == "own":
                continue
        out[name] = job(
            parallel=LAYOUTS[layout], data=data, loss=loss, metrics=metrics, security__allow=("tests",),
            model__tied="operators" not in LAYOUTS[layout], optim={"name": "sgd", "lr": 0.5}, train__steps=STEPS,
        )  # fmt: skip
    return out


Found = tuple[list[float], dict[str, float], dict[str, float], list[Piece]]


def rank_trains(world: World, cells: Mapping[str, tuple[Job, Plan]], folder: Path) -> dict[str, Found]:
    """For each job: the losses, the metrics of the last step and of a validation after it, and the weights."""
    out = {}
    for name, (j, plan) in cells.items():
        s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
        losses = []
        for step in range(STEPS):
            losses.append(loop.step(s, 1.0, measuring=step == STEPS - 1)[0])
            s.step = step + 1
        loop.validate(s, None)
        out[name] = losses, s.measured, s.results, pieces(s.model, weights=True)
    return out


def samples(name: str, split: str) -> Values:
    data = LOSSES[name][1]
    if data is VALUES:
        values = Measured(8, [8, 64], split)
        return values.tokens, values.values
    holed = Holed(8, split, hole=data.get("hole", -100))
    return holed.tokens, holed.following


def alone(name: str, j: Job, plan: Plan) -> tuple[list[float], nn.Module, nn.Module]:
    """Plain torch: the losses, and the model before and after the last step."""
    loss, (x, y) = LOSSES[name][3], samples(name, "train")
    model, before = plain(j, plan), plain(j, plan)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        before.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        made = loss(model(x), y)
        made.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(made.item())
    return losses, before, model


@torch.no_grad()
def figures(name: str, model: nn.Module, split: str) -> dict[str, float]:
    """All metrics that a job may have, and the loss."""
    x, y = samples(name, split)
    output = model(x)
    found = {"loss": LOSSES[name][3](output, y).item()}
    if y.is_floating_point():
        return found | {"abs_error": (output - y).abs().mean().item()}
    ignored = LOSSES[name][0].get("ignore_index", -100)
    counts = y != ignored
    best = output[counts].topk(3).indices == y[counts][:, None]
    plain_loss = F.cross_entropy(output[counts], y[counts]).item()
    return found | {
        "accuracy": best[:, 0].double().mean().item(), "top_3": best.any(1).double().mean().item(),
        "perplexity": exp(plain_loss), "holes": (y == -100).double().mean().item(),
    }  # fmt: skip


def assert_close(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    assert got.keys() <= want.keys()
    for key, value in got.items():
        assert value == pytest.approx(want[key], rel=1e-12), key


@pytest.mark.parametrize("layout", some(LAYOUTS, one_in=2))
def test_losses_and_metrics_are_those_of_plain_torch(layout: str, tmp_path: Path) -> None:
    cells = {name: (j, plan_job(j)) for name, j in jobs(layout).items()}
    size = next(plan.sizes.grid.size for _, plan in cells.values())
    ranks = on_ranks(size, rank_trains, cells, tmp_path)
    for name, (j, plan) in cells.items():
        losses, before, after = alone(name, j, plan)
        for got, measured, results, _ in (r[name] for r in ranks):
            assert got == pytest.approx(losses, rel=1e-12)
            assert len(measured) == len(j.metrics)
            assert_close(measured, figures(name, before, "train"))
            held_out = {n.removeprefix("val_"): v for n, v in results.items() if n not in ("val_step", "loss")}
            assert len(held_out) == 1 + len(j.metrics)
            assert_close(held_out, figures(name, after, "val"))
        off = {
            n: error(t, fill.tensors(after)[n].detach())
            for n, t in whole(plan, [p for r in ranks for p in r[name][3]]).items()
        }
        assert {n: e for n, e in off.items() if not e <= 1e-12} == {}, name
        assert_close(evaluate_in_one_process.held_out(after, j, None), figures(name, after, "val"))
