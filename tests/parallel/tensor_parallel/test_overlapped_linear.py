"""Input gradients that are sent while weight gradients are computed: the same bits, in another order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.job.schema.job import Job
from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.parallel_model import ParallelModel
from launcher.parallel.tensor_parallel.apply import install
from launcher.parallel.tensor_parallel.collectives import Axis, Sending, bring
from launcher.parallel.tensor_parallel.overlapped_linear import OverlappedLinear
from launcher.plan.plan import Plan
from launcher.plan.tensor_parallel.module_strategies import Operator
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training.pipeline import PipelineRuntime
from launcher.steps.certification.compare import Piece, pieces
from launcher.testing.meters import CollectiveMeter
from tests.parity import build, job, own, step
from tests.ranks import on_ranks
from tests.test_parity_tp import COLUMN, MEGATRON, ROW, SEQUENCE
from tests.tiers import some_of
from tests.tracing import TRACING

pytestmark = pytest.mark.filterwarnings(*TRACING)

SWITCH = "grad_matmul_communication_overlap"
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LEADS = ((8,), (1,), (3, 5), (4, 1), (2, 3, 4))
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "across memory": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a part of another": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "one row for all": lambda x: x[:1].expand(x.shape),
}


def gradients(x: Tensor, weight: Tensor, bias: Tensor | None, over: Tensor, beside: bool) -> list[Tensor]:
    """The output of a linear layer, and the gradients of all its inputs."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    own = leaves[1], leaves[2] if bias is not None else None
    linear, axis = OverlappedLinear(lambda: own), Axis(1, planned=True)
    entered = bring(leaves[0], None, None, axis, terms=True, enter=linear.enter if beside else None)
    y = linear.product(entered) if beside else F.linear(entered, *own)
    assert y is not None
    y.backward(over)
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_has_the_bits_and_the_strides_of_autograd(dtype, layout):
    """Torch uses another kernel for most of these memory layouts."""
    g = torch.Generator().manual_seed(0)
    for lead, (k, n), biased, turned in product(LEADS, ((6, 10), (64, 48), (1, 3)), (True, False), (True, False)):
        x = LAYOUTS[layout](torch.randn(*lead, k, generator=g).to(dtype))
        weight = torch.randn(k, n, generator=g).t() if turned else torch.randn(n, k, generator=g)
        bias = torch.randn(n, generator=g).to(dtype) if biased else None
        over = LAYOUTS[layout](torch.randn(*lead, n, generator=g).to(dtype))
        want, got = (gradients(x, weight.to(dtype), bias, over, beside) for beside in (False, True))
        assert len(want) == len(got) == 3 + biased
        for a, b in zip(want, got, strict=True):
            assert (torch.equal(a, b), a.stride()) == (True, b.stride())


def switched(j: Job, on: bool | str = True) -> Job:
    return j.model_copy(update={"parallel": j.parallel.model_copy(update={"transformer_opt": {SWITCH: on}})})


def lm(operators: dict[str, Any], ranks: int = 2, train: dict[str, Any] | None = None, **parallel: Any) -> Job:
    grid = {"tp": 2} | parallel.pop("grid", {})
    train = {"steps": 1, "batch_size": 8, "precision": "fp32"} | (train or {})
    changes = {"train": train, "model__layers": 2, "launch": {"nproc": ranks}}
    return job(parallel={"operators": operators, "grid": grid, **parallel}, **changes)


def net(name: str, operators: dict[str, Any], *shapes: list[Any], where: str = "nets", **parallel: Any) -> Job:
    parallel = {"operators": operators, "grid": {"tp": 2}, **parallel}
    return own(f"{where}.{name}", *shapes, stages=1, parallel=parallel, train__precision="fp32")


GATHERED = COLUMN | {"output": [None, None]}
TIMED = COLUMN | {"output": [None, None, None]}
AGAIN: dict[str, Any] = {"modules": "layers.*"}
PIPE: dict[str, Any] = {"stages": 2, "micro_batch_num": 4}
BRANCHES = {
    "wide": COLUMN, "down": ROW, "still": TIMED, "part": {"in": [[1, 2, 1], [1, 1]]}, "head": TIMED,
}  # fmt: skip
JOBS: dict[str, tuple[int, Job]] = {
    "megatron": (5, lm(MEGATRON)),
    "sequence": (5, lm(SEQUENCE)),
    "fp64": (5, lm(SEQUENCE, train={"precision": "fp64"})),
    "bf16": (5, lm(MEGATRON, train={"precision": "bf16"})),
    "blocks compiled": (1, lm(SEQUENCE, train={"compile": {"backend": "aot_eager"}})),
    "compiled": (0, lm(MEGATRON, train={"compile": {"backend": "aot_eager", "modules": "stages"}})),
    "a row alone": (1, lm({"layers.0.mlp.down": ROW})),
    "called twice": (2, net("Twice", {"shared": GATHERED, "head": ROW}, [6])),
    "changed in place": (1, net("InPlace", {"b": COLUMN, "head": ROW}, [6])),
    "a frozen first": (1, net("FrozenFirst", {"a": COLUMN, "b": ROW, "head": ROW}, ["int64"])),
    **{f"again, {k}": (5, lm(SEQUENCE, recompute=AGAIN | v)) for k, v in
       {"full": {}, "selective": {"policy": "selective"}, "kept": {"comm": "keep"},
        "selective and kept": {"policy": "selective", "comm": "keep"}}.items()},
    "a matmul again": (5, lm(MEGATRON, recompute={"modules": ["layers.*.mlp.gate", "head"]})),
    **{f"{level}, {k}": (5, lm(o, 4, hsdp={"threshold": 0, "optimizer_level": level})) for level in
       ("level1", "level2", "level3") for k, o in (("megatron", MEGATRON), ("sequence", SEQUENCE))},
    "level3, again": (5, lm(SEQUENCE, 4, hsdp={"threshold": 0, "optimizer_level": "level3"}, recompute=AGAIN)),
    "replicas": (5, lm(MEGATRON, 4, grid={"dp_replicate": 2})),
    **{s: (5, lm(SEQUENCE, 4, pipeline=PIPE | {"scheduler": s})) for s in ("1f1b", "gpipe")},
    "interleaved": (5, lm(MEGATRON, 4, pipeline={"stages": 2, "interleave": True})),
    "seqpipe": (5, lm(MEGATRON, 4, pipeline=PIPE | {"scheduler": "seqpipe", "seq_chunks": 2})),
    **{s: (0, lm(MEGATRON, 4, pipeline=PIPE | {"scheduler": s}))
       for s in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")},
    **{s: (5, lm(MEGATRON, 4, pipeline=PIPE | {"scheduler": s, "seq_chunks": 2, "interleave": True}))
       for s in ("seqvpp", "seqsmartvpp")},
    "biases, weights used three times, one frozen": (
        3, net("Branches", BRANCHES, [6, 4], where="tensor_parallel.overlap_nets")),
}  # fmt: skip
"""Jobs, each with the number of modules that send beside their weight gradient."""
CELLS = some_of(JOBS, 8)
Seen = tuple[float, list[Piece], dict[str, tuple[int, int]]]
"""The loss, the tensors of a rank, and what it has sent."""


def rank_cells(world: World, cells: Mapping[str, tuple[Job, Plan, Plan]]) -> dict[str, list[Seen]]:
    """A step without overlap, and a step with it."""
    return {name: [seen(j, *build(world, j, plan)) for plan in plans] for name, (j, *plans) in cells.items()}


def seen(j: Job, par: ParallelModel, pipe: PipelineRuntime) -> Seen:
    torch.manual_seed(0)
    with CollectiveMeter() as sent:
        loss = step(j, par, pipe)
    return loss.item(), pieces(par), sent.totals()


@cache
def ran() -> dict[str, list[list[Seen]]]:
    """The steps of each cell; ranks are forked once per size."""
    plans = {name: (j, plan_job(j), plan_job(switched(j))) for name, (_, j) in CELLS.items()}
    found = {}
    for size in {off.sizes.grid.size for _, off, _ in plans.values()}:
        mine = {name: cell for name, cell in plans.items() if cell[1].sizes.grid.size == size}
        ranks = on_ranks(size, rank_cells, mine)
        found |= {name: [r[name] for r in ranks] for name in mine}
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_is_the_same_to_the_last_bit_and_sends_as_much(cell):
    count, j = JOBS[cell]
    assert len(plan_job(switched(j)).operators.overlapped) == count
    for (loss, held, sent), (other, found, as_much) in ran()[cell]:
        assert (loss, sent) == (other, as_much)
        for a, b in zip(held, found, strict=True):
            assert (a.name, a.box) == (b.name, b.box)
            assert torch.equal(a.value, b.value), a.name


class Order(Dispatch):
    """Matmuls, collectives that begin, and waits for those that were not waited for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" or name in ("mm", "addmm"):
            self.seen.append(name.strip("_"))
        return func(*args, **(kwargs or {}))


def rank_order(world: World, j: Job, plan: Plan) -> list[str]:
    """The events of one step, forward and backward."""
    par, pipe = build(world, j, plan)
    real = Sending.wait

    def wait(sending: Sending) -> Tensor:
        if sending.work is not None:
            order.seen.append("wait")
        return real(sending)

    Sending.wait = wait  # only in this forked process
    with Order() as order:
        step(j, par, pipe)
    return order.seen


@pytest.mark.parametrize(("operators", "op"), [(MEGATRON, "allreduce"), (SEQUENCE, "reduce_scatter")])
def test_a_gradient_is_on_its_way_before_the_weight_gradient_and_waited_for_behind(operators, op):
    j = lm(operators, pipeline={"micro_batch_num": 1})
    plans = [plan_job(switched(j, on)) for on in (False, True)]
    (off, _), (on, _) = (on_ranks(2, rank_order, j, plan) for plan in plans)
    turns = [" ".join(on[n - 1 : n + 3]) for n, what in enumerate(on) if "wait" in on[n : n + 3] and what == op]
    assert turns == [f"mm {op} mm wait"] * 5
    assert "wait" not in off
    assert sorted(e for e in on if e != "wait") == sorted(off)


def column(weight: Tensor, world: World, beside: bool) -> nn.Linear:
    """A column-parallel layer."""
    axis = Axis(world.size, world.rank, torch.distributed.group.WORLD)
    layer = nn.Linear(weight.shape[1], weight.shape[0] // world.size, bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(axis.piece(weight, 0))
    o = Operator("0", "linear", "0", (("weight", (("tp",), ())),), input=None, output=None)
    install(
        nn.Sequential(layer),
        [ShardedOperator(o, None, None, makes=1, sums=False, gives=1)],
        axis,
        ["0"] if beside else [],
    )
    return layer


def second(world: World, weight: Tensor, x: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Second-order gradients, and two backwards through one graph, without and with overlap."""
    warnings.simplefilter("ignore")  # torch warns that it cannot differentiate the reduction
    out = []
    for beside in (False, True):
        layer, leaf = column(weight, world, beside), x.clone().requires_grad_()
        loss = layer(leaf).tanh().square().sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        twice = list(torch.autograd.grad(first.square().sum(), (layer.weight, leaf), retain_graph=True))
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert layer.weight.grad is not None
        assert leaf.grad is not None
        out.append((twice, [layer.weight.grad, leaf.grad, *torch.autograd.grad(loss, layer.weight)]))
    return out


def test_second_derivatives_and_second_backwards_are_what_they_are_without():
    g = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((4, 3), (5, 3)))
    for (twice, again), (other, same) in on_ranks(2, second, weight, x):
        assert all(map(torch.equal, [*twice, *again], [*other, *same]))
        assert not torch.equal(again[0], torch.zeros_like(again[0]))
