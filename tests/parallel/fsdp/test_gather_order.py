"""If the data decide what runs, all ranks gather and reduce the same weights, idle experts included."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from launcher.errors import RunError
from launcher.job.schema.job import Job
from launcher.optim.build import build_optimizer
from launcher.parallel import grad_norm
from launcher.parallel.grad_norm import watch
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.compare import Piece, error, pieces
from tests.parallel import expert_nets
from tests.parallel.counting import assert_as_planned
from tests.parity import build, own, place, whole
from tests.ranks import on_ranks
from tests.tiers import some, some_of

BATCH, TOKENS, MICROS = 16, 3, 2
ROUTES = {"uneven": [(0,), (0, 1), (1,), (2,)], "all": [(0, 1, 2, 3)] * 4}
"""Which experts each quarter of the batch may go to. Uneven: the last expert is idle on every rank in every micro
batch, and each other expert is idle on some rank, or on all ranks for one micro batch."""


def batch(route: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, scores of the experts, and classes."""
    g = torch.Generator().manual_seed(11)
    x = torch.randn(BATCH, TOKENS, 6, generator=g, dtype=torch.float64)
    who = torch.full((BATCH, TOKENS, 4), -50.0, dtype=torch.float64)
    for quarter, allowed in zip(who.chunk(4), ROUTES[route], strict=True):
        quarter[..., list(allowed)] = 0.5 + torch.rand(*quarter.shape[:2], len(allowed), generator=g).double()
    return x, who, torch.randint(0, 3, (BATCH,), generator=g)


def experts(net: str, stages: int = 1, level: str = "level1", **layout: Any) -> Job:
    """A job for the model ``net`` of ``expert_nets``; ``layout``: keys of ``parallel``, and ``precision``."""
    at = [n * stages // 4 for n in range(4)]
    cut = {"embed": 0, **{f"blocks.{n}": s for n, s in enumerate(at)}, "head": stages - 1}
    asked = layout.pop("pipeline", {})
    pipeline = {"stages": stages // asked.get("chunks", 1), "micro_batch_num": MICROS, **asked}
    pipeline |= {"stage_config": cut} if stages > 1 else {}
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level} | layout.pop("hsdp", {})
    train = {"train__precision": layout.pop("precision", "fp64"), "train__batch_size": BATCH}
    parallel = {"hsdp": hsdp, "pipeline": pipeline, **layout}
    return own(f"expert_nets.{net}", [TOKENS, 6], [TOKENS, 4], stages=1, parallel=parallel, **train)


Step = tuple[list[Piece], list[Piece], list[Piece], dict[str, float]]
"""A rank's weights before a step, its gradients after it, its weights after a second step, and its own norms."""
Skipped = Callable[[int], set[str]]


def here_or_there(at: int) -> set[str]:
    """The blocks that ``Drops`` leaves out on rank ``at``: one on all ranks, one that differs by rank."""
    return {"blocks.1", ["blocks.0", "blocks.2"][at % 2]}


def turned(at: int) -> set[str]:
    return {"turned"} if at else set()


def rank_step(world: World, j: Job, plan: Plan, route: str, skipped: Skipped = here_or_there) -> Step:
    """Two optimizer steps on the same samples."""
    par, pipe = build(world, j, plan)
    own_norms, optimizer = watch(par), build_optimizer(j.optim, par.param_groups())
    before, after, norms = pieces(par, weights=True), list[Piece](), dict[str, float]()
    n, at = plan.sizes.local_batch, place(plan, par.meshes)
    x, who, y = (t[at * n : (at + 1) * n] for t in batch(route))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        expert_nets.SKIPPED = skipped(at)
        low = dtype_of(plan.dtypes.compute)
        pipe.step((x.to(low), who.to(low)), y)
        expert_nets.SKIPPED = set()
        after, norms = after or pieces(par), norms or own_norms.take(plan.sizes.replicas)
        square = grad_norm.build(par).squared()
        torch.distributed.all_reduce(square)
        grad_norm.build(par).clip(square.sqrt().item(), 0.1)
        optimizer.step()
    return before, after, pieces(par, weights=True), norms


def rank_steps(world: World, cells: Mapping[str, tuple[Job, Plan, str]]) -> dict[str, Step]:
    out = {}
    for key, cell in cells.items():
        try:
            out[key] = rank_step(world, *cell)
        except Exception as error:
            error.add_note(f"in {key}")
            raise
    return out


class Oracle:
    """Plain torch in one process, micro batch by micro batch."""

    def __init__(self, net: str, weights: Mapping[str, Tensor], route: str, plan: Plan, skipped: Skipped) -> None:
        self.dtype = next(iter(weights.values())).dtype
        self.model = getattr(expert_nets, net)().to(self.dtype)
        self.low = torch.float64 if self.dtype == torch.float64 else torch.bfloat16
        self.route, self.skipped = route, skipped
        self.replicas, self.micros = plan.sizes.replicas, plan.sizes.micros
        names = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, w in weights.items():
                names[name].copy_(w)

    def grads(self, ranks: Collection[int] | None = None) -> dict[str, Tensor]:
        """Every gradient of the full batch, or of the samples of some ``ranks``; unused weights have none."""
        parts = self.replicas * self.micros
        for p in self.model.parameters():
            p.grad = None
        for n, (x, who, y) in enumerate(zip(*(t.chunk(parts) for t in batch(self.route)), strict=True)):
            if ranks is None or n // self.micros in ranks:
                expert_nets.SKIPPED = self.skipped(n // self.micros)
                low = {n: p.to(self.low) for n, p in self.model.named_parameters()}
                out = functional_call(self.model, low, (x.to(self.low), who.to(self.low)))
                (cross_entropy(out.to(self.dtype), y) / parts).backward()
        expert_nets.SKIPPED = set()
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def train(self, lr: float, decay: float, betas: tuple[float, float]) -> dict[str, Tensor]:
        """The weights after two steps; only matrices decay."""
        flat, wide = ([p for p in self.model.parameters() if (p.dim() > 1) == big] for big in (False, True))
        groups = [{"params": flat, "weight_decay": 0.0}, {"params": wide, "weight_decay": decay}]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas)
        for _ in range(2):
            self.grads()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            optimizer.step()
        return dict(self.model.named_parameters())


def assert_exact(cells: Mapping[str, tuple[str, Job, str]], tolerance: float = 1e-12) -> dict[str, list[Step]]:
    """Assert that each job has the gradients of one process, and none where that has none; in fp64 also that
    the weights after two optimizer steps are equal. Returns the steps of each job's ranks."""
    made = {k: (j, plan_job(j), route) for k, (_, j, route) in cells.items()}
    out = {}
    for size in {p.sizes.grid.size for _, p, _ in made.values()}:
        mine = {k: c for k, c in made.items() if c[1].sizes.grid.size == size}
        found = on_ranks(size, rank_steps, mine, timeout_s=120)
        for key, (j, plan, route) in mine.items():
            ranks = out[key] = [r[key] for r in found]
            before, got, after = (whole(plan, [p for r in ranks for p in r[i]]) for i in range(3))
            oracle = Oracle(cells[key][0], before, route, plan, here_or_there)
            want = oracle.grads()
            assert got.keys() == want.keys(), (key, got.keys() ^ want.keys())
            assert_near(key, got, want, tolerance)
            if plan.precision == "fp64":
                weights = oracle.train(j.optim.lr, j.optim.weight_decay, j.optim.betas)
                assert_near(key, after, {n: weights[n].detach() for n in before}, 1e-9)
    return out


def assert_near(key: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> None:
    off = {n: error(g, want.get(n, torch.zeros_like(g))) for n, g in got.items()} | dict.fromkeys(
        want.keys() - got, 1.0
    )
    wrong = {n: e for n, e in off.items() if not e <= tolerance}
    assert not wrong, (key, wrong)


@pytest.fixture(autouse=True)
def too_large_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of these models choose what runs by the full batch, and the plan refuses such a model if it tries it."""
    monkeypatch.setattr("launcher.parallel.trace.mixing_samples.FEW", 0)


LEVELS = ("level1", "level2", "level3")
ALONE = {
    f"{net}, {level}": (net, experts(net, level=level), "uneven")
    for net in ("Top1", "Top2", "Lone", "Skips", "Shared", "Exits", "Permutes", "Drops") for level in LEVELS
}  # fmt: skip


def test_data_dependent_models_are_exact_on_one_stage_over_two_shards():
    assert_exact(some_of(ALONE) | {"all busy": ("Top1", experts("Top1", level="level3"), "all")})


APART: dict[str, Any] = {"comm_fusion": {"openstate": False}}
FUSED: dict[str, Any] = {"comm_fusion": {"allgather": {"mode": "size"}}}
REPLICAS: dict[str, Any] = {"grid": {"dp_replicate": 2}}
INTERLEAVED: dict[str, Any] = {"stages": 4, "pipeline": {"interleave": True, "chunks": 2}}
ZERO_BUBBLE: dict[str, Any] = {"stages": 2, "pipeline": {"scheduler": "zero_bubble_h1", "micro_batch_num": 4}}
V: dict[str, Any] = {
    "stages": 4, "pipeline": {"scheduler": "zero_bubble_v", "interleave": True, "chunks": 2, "micro_batch_num": 4}
}  # fmt: skip
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("Top1 Lone Skips Drops", "level3", APART), ("Lone Drops", "level2", APART),
    ("Top2 Skips", "level3", FUSED), ("Drops", "level2", FUSED), ("Top1", "level2", {"hsdp": {"threshold": 1}}),
    ("Top2", "level1", {"stages": 2}), ("Top1 Shared", "level2", {"stages": 2}),
    ("Lone Skips", "level3", {"stages": 2}), ("Top1 Skips", "level3", APART | {"stages": 2}),
    ("Top1", "level1", REPLICAS), ("Lone", "level2", REPLICAS), ("Top1 Drops", "level3", REPLICAS),
    ("Top1", "level2", INTERLEAVED), ("Shared Skips", "level3", INTERLEAVED),
    ("Top1", "level1", ZERO_BUBBLE), ("Top2 Lone", "level2", ZERO_BUBBLE), ("Top1 Shared", "level2", V),
]  # fmt: skip


def test_data_dependent_models_are_exact_in_every_layout():
    assert_exact(some_of({
        f"{net}, {level}, {layout}": (net, experts(net, level=level, **layout), "uneven")
        for nets, level, layout in LAYOUTS for net in nets.split()
    }))  # fmt: skip


def test_data_dependent_models_are_exact_in_bf16():
    cells = {f"{net}, {n}": (net, experts(net, level=n, precision="bf16"), "uneven")
             for net in ("Top1", "Drops") for n in LEVELS}  # fmt: skip
    assert_exact(some_of(cells, 2), tolerance=1e-6)


def test_local_norms_are_those_of_the_gradients_of_the_rank():
    ranks = assert_exact({"Top1": ("Top1", experts("Top1"), "uneven")})["Top1"]
    plan = plan_job(experts("Top1"))
    weights = whole(plan, [p for r in ranks for p in r[0]])
    for at, (_, _, _, norms) in enumerate(ranks):
        own_grads = Oracle("Top1", weights, "uneven", plan, here_or_there).grads({at})
        assert norms.keys() == own_grads.keys()
        assert norms == pytest.approx({n: 2 * g.norm().item() for n, g in own_grads.items()}, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_collectives_are_as_planned(level):
    assert_as_planned(experts("Top1", level=level, comm_fusion={"openstate": False}))


def rank_turned(world: World, j: Job, plan: Plan) -> Step:
    return rank_step(world, j, plan, "all", turned)


def test_an_order_that_no_plan_can_know_is_right_where_nothing_is_gathered_on_the_way():
    j = experts("Drops", level="level2")
    plan = plan_job(j)
    ranks = on_ranks(2, rank_turned, j, plan)
    before, got = (whole(plan, [p for r in ranks for p in r[i]]) for i in range(2))
    assert_near("turned", got, Oracle("Drops", before, "all", plan, turned).grads(), 1e-12)


def test_an_order_that_no_plan_can_know_is_told_where_it_would_mix_weights():
    j = experts("Drops", level="level3")
    with pytest.raises(RunError) as caught:
        on_ranks(2, rank_turned, j, plan_job(j))
    assert str(caught.value).splitlines()[0] == (
        "rank 1: blocks.2 (stage 0) is called more often than planned, or in another order; with "
        "parallel.hsdp.optimizer_level=level1 parallel.transformer_opt.grad_computation_allreduce_overlap=false "
        "any order is possible"
    )


NOTE = (
    "parallel.hsdp {} at data, so ranks may run different code: every rank gathers all {} weights, "
    "and missing gradients count as zeros"
)
MIXTURES = [f"blocks.{n}.mixture" for n in range(4)]
GROUPS = {
    "Top1": ([*MIXTURES], "blocks.0.mixture, blocks.1.mixture, blocks.2.mixture and 1 more look"),
    "Skips": (["blocks.0.mixture", "blocks.1", "blocks.2.mixture", "blocks.3"],
              "blocks.0.mixture, blocks.1, blocks.2.mixture and 1 more look"),
    "Permutes": ([""], "the model, blocks.0.mixture, blocks.1.mixture and 2 more look"),
}  # fmt: skip


@pytest.mark.parametrize("net", some(GROUPS))
def test_nothing_is_gathered_by_itself_inside_of_what_looks_at_data(net):
    """This is so even where every module is gathered alone."""
    plan = plan_job(experts(net, level="level3", comm_fusion={"openstate": False}))
    modules, said = GROUPS[net]
    names = [m for g in plan.groups for m in g.modules]
    assert sorted(m for m in names if m in modules) == modules
    assert not [m for m in names if "expert" in m or "inner" in m or "router" in m]
    assert NOTE.format(said, "their") in map(str, plan.notes)


def test_a_model_that_reads_no_values_gets_no_note():
    assert not [n for n in plan_job(experts("Drops")).notes if "look" in n.text]
