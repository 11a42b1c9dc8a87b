"""One step's loss, gradients and buffers under a layout and in one process, which parity tests compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from launcher.job.schema.job import Job
from launcher.objective.build import build_loss
from launcher.optim.build import build_optimizer
from launcher.optim.sharded import pieces_of
from launcher.parallel import grad_norm, mesh
from launcher.parallel.deferred_init import fill
from launcher.parallel.mesh import Meshes
from launcher.parallel.parallel_model import ParallelModel, parallelize
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan
from launcher.plan.resolve.stage_config import flatten
from launcher.planner.plan_job import builder, inputs, plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.steps.certification.compare import Piece, error, pieces
from launcher.steps.certification.compare import full_tensors as joined
from tests.optim.grouped import grouped
from tests.parity.reference import Outcome, accumulate, plain
from tests.ranks import DRAWN, on_ranks

LM = {"name": "lm", "vocab_size": 64, "dim": 16, "layers": 4, "heads": 2}
TOKENS = {"name": "random_tokens", "vocab_size": 64, "seq_len": 8}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
CPU = torch.device("cpu")
K = TypeVar("K")
Step = tuple[float, float, list[Piece]]
"""Mean loss, norm, and the pieces of a rank."""


def job(**changes: Any) -> Job:
    """A small job; ``parallel__pipeline__stages=2`` sets ``parallel.pipeline.stages``."""
    data: dict[str, Any] = {
        "name": "parity", "model": dict(LM), "data": dict(TOKENS), "optim": {"name": "adamw"},
        "schedule": {"name": "constant"}, "train": {"steps": 1, "batch_size": 8, "precision": "fp64"},
    }  # fmt: skip
    for path, value in changes.items():
        at = data
        *around, last = path.split("__")
        for key in around:
            at = at.setdefault(key, {})
        at[last] = value
    return Job.model_validate(data)


def own(net: str, *shapes: list[Any], stages: Mapping[str, Any] | int, **changes: Any) -> Job:
    """A job for the module ``tests.parallel.<net>``, whose forward takes inputs of ``shapes`` after the batch.

    If ``net`` begins with ``tests``, it is the full name.

    ``stages``: a ``stage_config``, or a number of stages, to be split automatically.
    """
    count = stages if isinstance(stages, int) else max(flatten(stages).values()) + 1
    pipeline: dict[str, Any] = {"stages": count} | ({} if isinstance(stages, int) else {"stage_config": dict(stages)})
    model = changes.get("model", {"_target_": net if net.startswith("tests.") else f"tests.parallel.{net}"})
    data = {"_target_": "tests.parallel.sources.Shapes", "shapes": [list(s) for s in shapes]}
    return job(**{
        "model": model,
        "data": data | {"target": _positions(model, data["shapes"])},
        "security__allow": ("tests",),
        "train__batch_size": 12,
        "parallel": {"pipeline": pipeline},
    } | changes)  # fmt: skip


def _positions(model: dict[str, Any], shapes: Any) -> list[int]:
    """The shape of one sample's targets, if the last dim of the logits is the classes; empty if the forward fails."""
    try:
        with torch.no_grad():  # with real values, because some models read them
            made = builder(job(model=dict(model), security__allow=("tests",)))()
            xs = [torch.zeros(1, *s[1:], dtype=torch.int64) if s[0] == "int64" else torch.zeros(1, *s) for s in shapes]
            return list(made(*xs).shape[1:-1])
    except Exception:
        return []


def batch(j: Job, plan: Plan) -> tuple[tuple[Tensor, ...], Tensor]:
    """A fixed global batch: inputs, and class indices that fit the model's output."""
    g = torch.Generator().manual_seed(5)
    top = getattr(j.data, "vocab_size", 8)
    xs = tuple(
        torch.randn(s.shape, generator=g, dtype=torch.float64).to(dtype_of(s.dtype)) if s.dtype.startswith("float")
        else torch.randint(0, top, s.shape, generator=g).to(dtype_of(s.dtype))
        for s in inputs(j, j.train.batch_size)
    )  # fmt: skip
    *shape, classes = plan.output[0].shape
    if plan.operators.output is not None:
        classes *= plan.sizes.grid["tp"]
    return xs, torch.randint(0, classes, (j.train.batch_size, *shape[1:]), generator=g)


def place(plan: Plan, meshes: Meshes) -> int:
    """This rank's data-parallel index."""
    at = meshes.coords
    return at["dp_replicate"] * plan.sizes.grid["dp_shard"] + at["dp_shard"]


def build(world: World, j: Job, plan: Plan) -> tuple[ParallelModel, PipelineRuntime]:
    """The live model of one rank."""
    meshes = mesh.build(plan.sizes.grid, "cpu", plan.ties)
    par = parallelize(DRAWN.take(j, plan), plan, meshes, CPU)
    return par, PipelineRuntime(par, inputs(j, plan.sizes.micro_batch), build_loss(j.loss, j.security.allow), CPU)


def step(j: Job, par: ParallelModel, pipe: PipelineRuntime) -> Tensor:
    """Forward and backward of this rank's part of the batch; returns the loss of the pipeline."""
    xs, y = batch(j, par.plan)
    n, at = par.plan.sizes.local_batch, place(par.plan, par.meshes)
    mine = slice(at * n, (at + 1) * n)
    return pipe.step(tuple(x[mine] for x in xs), y[mine])


def rank_step(world: World, j: Job, plan: Plan) -> Step:
    """One forward and backward on one rank: mean loss, norm, and the pieces of this rank."""
    par, pipe = build(world, j, plan)
    both = torch.stack([step(j, par, pipe), grad_norm.build(par).squared()])
    torch.distributed.all_reduce(both)
    return both[0].item(), both[1].sqrt().item(), pieces(par)


def rank_train(world: World, j: Job, plan: Plan, steps: int, clip: float = 1.0) -> list[Piece]:
    """Take optimizer steps on one rank, and return the weights after them."""
    par, pipe = build(world, j, plan)
    cut = pieces_of(par.layouts(), world.rank, par.meshes.axes)
    optimizer, norms = build_optimizer(j.optim, par.param_groups(), pieces=cut), grad_norm.build(par)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        step(j, par, pipe)
        square = norms.squared()
        torch.distributed.all_reduce(square)
        norms.clip(square.sqrt().item(), clip)
        optimizer.step()
    return pieces(par, weights=True)


def whole(plan: Plan, found: list[Piece]) -> dict[str, Tensor]:
    """Full tensors. Pieces of the same elements must be bit-equal: replicas, and the copies of a tied tensor."""
    full = joined(plan, found)
    assert not full.complaints, "; ".join(full.complaints)
    return full.tensors


@dataclass(frozen=True)
class Run:
    """The results of every rank in a layout, and those of one process."""

    plan: Plan
    ranks: list[Step]
    want: Outcome

    def assert_same(self) -> Plan:
        assert_same(outcome(self.plan, self.ranks), self.want, TOLERANCE[self.plan.precision])
        return self.plan


def together(jobs: Mapping[K, Job]) -> dict[K, Run]:
    """Run each job in its layout and in one process. Ranks are forked once per world size, and run all its jobs."""
    plans = {k: plan_job(j) for k, j in jobs.items()}
    found: dict[K, list[Step]] = {}
    for size in {p.sizes.grid.size for p in plans.values()}:
        mine = {k: (jobs[k], p) for k, p in plans.items() if p.sizes.grid.size == size}
        ranks = on_ranks(size, rank_steps, mine, timeout_s=120)
        found |= {k: [r[k] for r in ranks] for k in mine}
    want: dict[str, Outcome] = {}
    out = {}
    for k, j in jobs.items():
        same = j.model_dump_json(include={"model", "data", "train", "seed"})
        if same not in want:
            want[same] = alone(j, plans[k])
        out[k] = Run(plans[k], found[k], want[same])
    return out


def rank_steps(world: World, cells: Mapping[K, tuple[Job, Plan]]) -> dict[K, Step]:
    out = {}
    for k, (j, plan) in cells.items():
        try:
            out[k] = rank_step(world, j, plan)
        except Exception as error:
            error.add_note(f"in {k}")
            raise
    return out


def under_layout(j: Job) -> tuple[Plan, Outcome]:
    """Run ``j``'s layout on real gloo ranks and put the pieces together."""
    plan = plan_job(j)
    return plan, outcome(plan, on_ranks(plan.sizes.grid.size, rank_step, j, plan, timeout_s=120))


def outcome(plan: Plan, ranks: list[Step]) -> Outcome:
    """The full tensors, put together from the pieces of all ranks."""
    full = whole(plan, [p for _, _, held in ranks for p in held])
    buffers = {p.name for p in plan.params if p.buffer}
    return Outcome(
        ranks[0][0], ranks[0][1],
        {n: t for n, t in full.items() if n not in buffers}, {n: t for n, t in full.items() if n in buffers},
    )  # fmt: skip


def train_alone(j: Job, plan: Plan, steps: int, clip: float = 1.0) -> dict[str, Tensor]:
    """The weights after ``steps`` steps of the plain model with torch's own clipping."""
    model = plain(j, plan)
    optimizer = build_optimizer(j.optim, grouped(j.optim, model.named_parameters()))
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        accumulate(model, *batch(j, plan), 1)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    mine = fill.tensors(model)
    return {p.name: mine[p.name].detach() for p in plan.params}


def alone(j: Job, plan: Plan, parts: int = 1) -> Outcome:
    """The full batch through the plain model, at once or in ``parts``."""
    model = plain(j, plan)
    loss = accumulate(model, *batch(j, plan), parts)
    mine = fill.tensors(model)
    grads = {p.name: g for p in plan.params if p.trainable and (g := mine[p.name].grad) is not None}
    square = torch.stack([g.double().square().sum() for g in grads.values()]).sum()
    return Outcome(loss, square.sqrt().item(), grads, {p.name: mine[p.name] for p in plan.params if p.buffer})


def assert_same(got: Outcome, want: Outcome, tolerance: float) -> None:
    """Assert that loss, norm, gradients and buffers differ at most by ``tolerance``, relative to each one's maximum."""
    differ = got.grads.keys() ^ want.grads.keys()
    assert not differ, f"only one of both has gradients of {sorted(differ)}"
    assert got.buffers.keys() == want.buffers.keys()
    off = {"loss": abs(got.loss - want.loss) / abs(want.loss), "norm": abs(got.norm - want.norm) / want.norm}
    off |= {n: error(g, want.grads[n]) for n, g in got.grads.items()}
    off |= {n: error(b, want.buffers[n]) for n, b in got.buffers.items()}
    wrong = {n: e for n, e in off.items() if not e <= tolerance}
    assert not wrong, f"over {tolerance}: {wrong}"


def assert_parity(j: Job, parts: int = 1) -> tuple[Plan, Outcome]:
    """Assert that N ranks equal one process, within the tolerance of law 6."""
    plan, got = under_layout(j)
    assert_same(got, alone(j, plan, parts), TOLERANCE[plan.precision])
    return plan, got
