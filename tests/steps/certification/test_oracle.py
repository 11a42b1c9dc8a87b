"""The reference of certificates is independent of the launcher's training code, and correct by itself."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from launcher.data.open import open_data
from launcher.data.shuffle import batch_indices
from launcher.job.schema.optim import WSD, Constant, Cosine, CosineRestarts, Linear, NamedSchedule, Polynomial
from launcher.job.schema.user_class import Target
from launcher.optim.schedule import factor
from launcher.steps.certification.oracle import initial_weights, learning_rates, sample_order
from launcher.steps.certification.oracle import model as models
from launcher.steps.certification.oracle.samples import First, Narrow, held_out
from launcher.steps.certification.oracle.training import Cut, ReferenceTraining
from launcher.steps.certification.process_states import ProcessStates
from launcher.steps.certify import _undropped
from tests.parity import job
from tests.steps.certified import of
from tests.steps.nets import Draws

FOLDER = Path(initial_weights.__file__).parent
MAY_IMPORT = {
    "launcher.job.schema.job", "launcher.job.schema.components", "launcher.job.schema.data",  # the request
    "launcher.job.schema.models", "launcher.job.schema.objective", "launcher.job.schema.optim",
    "launcher.job.schema.user_class",
    "launcher.job.targets",  # classes that the request names
    "launcher.models.build", "launcher.data.source",
    "torch", "numpy",
}  # fmt: skip


def test_the_reference_shares_no_code_with_what_it_judges() -> None:
    wrong = []
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in (*MAY_IMPORT, *sys.stdlib_module_names) or name in MAY_IMPORT
                if not known and not name.startswith("launcher.steps.certification.oracle"):
                    wrong.append(f"{path.name} imports {name}")
    assert wrong == []


@pytest.mark.parametrize(("seed", "batch", "n"), [(0, 4, 6), (7, 5, 3), (3, 8, 64)])
def test_the_order_of_samples_is_the_documented_one(seed: int, batch: int, n: int) -> None:
    for step in range(6):
        assert sample_order.order(seed, step, batch, n).tolist() == batch_indices(seed, step, batch, n).tolist()


SCHEDULES: list[NamedSchedule] = [
    Constant(name="constant", warmup_steps=3), Linear(name="linear", warmup_steps=2, final=0.25),
    Cosine(name="cosine", warmup_steps=0), Cosine(name="cosine", warmup_steps=9, final=0.0), Linear(name="linear"),
    Polynomial(name="polynomial", warmup_steps=1, power=1.7, final=0.1), Polynomial(name="polynomial", power=0.3),
    CosineRestarts(name="cosine_restarts", warmup_steps=1, period_steps=1, period_multiplier=2, final=0.2),
    CosineRestarts(name="cosine_restarts", period_steps=3), WSD(name="wsd", warmup_steps=1, decay_share=0.6, final=0.1),
    WSD(name="wsd", decay_share=0.5, decay_shape="linear"), WSD(name="wsd", warmup_steps=2, decay_steps=9),
    WSD(name="wsd", decay_steps=0), WSD(name="wsd", warmup_steps=9, decay_steps=3),
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("total", [1, 2, 7])
def test_the_learning_rate_is_the_documented_one(schedule: NamedSchedule, total: int) -> None:
    found = [learning_rates.share(schedule, step, total) for step in range(total + 2)]
    assert found == pytest.approx([factor(schedule, step, total) for step in range(total + 2)], rel=1e-15)


def test_a_schedule_of_the_users_own_says_its_learning_rate() -> None:
    asked = Target.model_validate({"_target_": "tests.optim.own_schedules.InverseRoot", "warmup": 2})
    share = learning_rates.shares(asked, 5, ("tests",))
    assert [share(step) for step in range(5)] == [0.5, 1.0, (2 / 3) ** 0.5, 0.5**0.5, (2 / 5) ** 0.5]


def training(net: str, ranks: int, micros: int, **changes: object) -> ReferenceTraining:
    asked = job(**of(net, **changes))
    data = open_data(asked.data, seed=0, allow=("tests",))
    cut = Cut(asked.train.batch_size, ranks, micros, asked.train.steps)
    process = ProcessStates([]).process
    build = partial(models.construct, asked, asked.seed)
    return ReferenceTraining(
        asked, data, cut, {}, construct=build, device=torch.device("cpu"), prepare=_undropped, process=process
    )


def test_the_loss_is_a_mean_over_what_counts_in_the_global_batch() -> None:
    ignoring = {"data": {"_target_": "tests.steps.nets.Draws", "ignored": 3}}
    cut, whole = training("Net", 2, 4, **ignoring), training("Net", 1, 1, **ignoring)
    xs, y = cut.batch(0)
    assert 0 < cut.objective.counted(y) < y.numel()
    found = cut.backward((xs, y), None, 1.0)
    want = nn.functional.cross_entropy(cut.models[0](*xs).flatten(0, 1), y.flatten())
    assert found.loss == pytest.approx(want.item(), rel=1e-14)
    same = whole.backward((xs, y), None, 1.0)
    for name, g in same.grads.items():
        torch.testing.assert_close(found.grads[name], g, rtol=1e-13, atol=1e-15)


def test_each_data_parallel_rank_begins_with_the_buffers_of_the_step_before() -> None:
    t = training("Averaged", 2, 2, model={"_target_": "tests.steps.nets.Averaged", "used": True})
    xs, y = t.batch(0)
    found = t.backward((xs, y), None, 1.0)
    a, b = t.models[0].get_submodule("a"), t.models[0].get_submodule("b")
    losses, kept = [], []
    for x, target in zip(xs[0].chunk(2), y.chunk(2), strict=True):  # one rank each
        seen = torch.zeros(8, dtype=torch.float64)
        for micro, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            h = torch.tanh(a(micro)).detach()
            seen = seen * 0.9 + h.mean((0, 1)) * 0.1
            losses.append(nn.functional.cross_entropy(b(h + seen).flatten(0, 1), wanted.flatten()))
        kept.append(seen)
    assert found.loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-13)
    torch.testing.assert_close(found.buffers["follower.seen"], kept[0], rtol=1e-13, atol=1e-15)
    assert all(torch.equal(m.get_buffer("follower.seen").cpu(), found.buffers["follower.seen"]) for m in t.models)


def test_a_model_that_cannot_be_copied_is_built_again_around_the_same_weights() -> None:
    t = training("Uncopied", 3, 1, train__batch_size=18)
    assert all(p is q for m in t.models for p, q in zip(m.parameters(), t.models[0].parameters(), strict=True))
    assert len({id(m.get_buffer("kept")) for m in t.models}) == 3
    one = training("Uncopied", 1, 1, train__batch_size=18)
    assert t.backward(t.batch(0), None, 1.0).loss == pytest.approx(
        one.backward(one.batch(0), None, 1.0).loss, rel=1e-13
    )


def test_a_loss_scale_is_halved_until_gradients_fit() -> None:
    t = training("Loud", 2, 2, train__precision="fp16")
    scale = t.scale(65536.0)
    assert 1 < scale < 65536
    assert np.isfinite(t.backward(t.batch(0), None, scale).norm)
    assert not np.isfinite(t.backward(t.batch(0), None, 65536.0).norm)
    assert training("Loud", 2, 2).scale(1.0) == 1.0


def test_a_narrow_batch_leaves_other_experts_idle_on_each_rank() -> None:
    t = training("Routed", 2, 2)
    idle = t._idle(0, t.narrow(0))
    assert idle is not None
    assert all(idle)
    assert idle[0] != idle[1]
    assert all(p.grad is None for p in t.named.values())


def test_a_model_that_cannot_take_one_position_over_and_over_gets_whole_samples() -> None:
    assert training("Net", 2, 2).narrow(0) == Narrow(0, positions=True)
    assert training("Picky", 2, 2).narrow(0) == Narrow(0, positions=False)


@pytest.mark.parametrize(
    ("there", "batch", "used"), [(40, 8, 13), (40, 2, 3), (40, 1, 1), (13, 8, 13), (8, 8, 7), (0, 8, 0), (1, 1, 1)]
)
def test_held_out_samples_end_inside_a_batch(there: int, batch: int, used: int) -> None:
    assert len(held_out(Draws("val", there), batch)) == used


def test_a_view_of_samples_is_no_longer_than_they_are() -> None:
    assert [len(First(Draws("val", 3), n)) for n in (2, 5)] == [2, 3]
    assert Narrow(5, positions=True).order(np.arange(10, 18), 4).tolist() == [11] * 4 + [15] * 4


def padded() -> Tensor:
    return nn.Embedding(50, 8, padding_idx=3).weight.detach()


DRAWS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(40, 8) * 0.02,
    "one number": lambda: torch.randn(1),
    "one of two": lambda: torch.randint(0, 2, (1,)),
    "uniform": lambda: torch.rand(7),
    "heavy tails": lambda: torch.empty(64, 4).cauchy_(),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(16, 16)),
    "mostly zeros": lambda: nn.init.sparse_(torch.empty(64, 16), 0.9),
    "signs": lambda: torch.randint(0, 2, (64, 1)) * 2.0 - 1,
    "rare zeros": lambda: (torch.rand(200, 1) > 0.04).float(),
    "all of one draw": lambda: torch.ones(6, 6) * torch.randn(()),
    "an order": lambda: torch.randperm(30),
    "a row of zeros": padded,
    "fixed": lambda: torch.linspace(0, 1, 9),
    "complex": lambda: torch.randn(9, 3, dtype=torch.complex64),
    "half precision": lambda: torch.randn(9, 3).bfloat16(),
    "nothing": lambda: torch.empty(0, 3),
    "truth": lambda: torch.rand(5, 5) > 0.5,
}


def seeded(draw: Callable[[], Tensor], n: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(n)
        return {"w": draw()}


@pytest.mark.parametrize("kind", DRAWS)
def test_another_draw_from_the_same_distribution_is_no_complaint(kind: str) -> None:
    draw = DRAWS[kind]
    wrong = [
        found
        for n in range(60)
        if (found := initial_weights.complaints(seeded(draw, 0), lambda k: seeded(draw, k), seeded(draw, 1000 + n)))
    ]
    assert wrong == []


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "fifty times too large": (
        "normal", lambda t: t * 50, "its standard deviation is N; in 24 plain constructions it is N to N",
    ),
    "zeros": ("normal", torch.zeros_like, "its standard deviation is N; in 24 plain constructions it is N to N"),
    "moved": ("normal", lambda t: t + 1, "its largest number is N; in 24 plain constructions it is N to N"),
    "clipped": (
        "normal", lambda t: t.clamp(-0.005, 0.005),
        "its standard deviation is N; in 24 plain constructions it is N to N",
    ),
    "no numbers": (
        "normal", lambda t: t / 0, "has numbers that are not finite; a plain construction has none",
    ),
    "another dtype": ("normal", Tensor.double, "is float64[40, 8], but float32[40, 8] in a plain construction"),
    "a row that should be zero": (
        "a row of zeros", lambda t: t + 1e-3, "differs from the equal values of 24 plain constructions in 1 of 50 rows",
    ),
    "another constant": ("fixed", lambda t: t * 1.01, "differs from the equal values of 24 plain constructions"),
    "no zeros where most are": (
        "mostly zeros", lambda t: t + 1e-4, "its share of zeros is N; in 24 plain constructions it is N",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_no_construction_makes_are_named_with_the_figure_that_is_off(case: str) -> None:
    kind, change, said = WRONG[case]
    draw = DRAWS[kind]
    found = initial_weights.complaints(seeded(draw, 0), lambda k: seeded(draw, k), {"w": change(seeded(draw, 99)["w"])})
    assert {name: re.sub(r"(?<= )\d[\d.e-]*(?=,|;| to|$)", "N", text) for name, text in found.items()} == {"w": said}


def test_constructions_draw_from_numpy_and_random_by_their_seed_too() -> None:
    asked = job(model={"_target_": "tests.parallel.constructors.OtherSources"}, security__allow=("tests",))
    first, same, other = (models.state(models.construct(asked, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(t, same[name]) for name, t in first.items())
    assert not any(torch.equal(t, other[name]) for name, t in first.items())


def test_only_what_never_learns_and_runs_in_half_precision_may_be_kept_so() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    plain = models.state(net)
    made = {n: t.detach().bfloat16() for n, t in plain.items()}

    def dtypes(precision: str) -> set[str]:
        kept = models.in_dtypes_of_run(made, plain, precision)
        assert all(t.float().equal(plain[n].to(t.dtype).float()) for n, t in kept.items())
        return {n for n, t in kept.items() if t.dtype == torch.bfloat16}

    assert dtypes("bf16") == {"0.weight", "0.bias"}
    assert dtypes("fp16") == dtypes("fp32") == dtypes("fp64") == set()


class Shares(nn.Module):
    """A tied parameter, a tied buffer, and a tensor that is a plain attribute of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.a.register_buffer("seen", torch.zeros(2))
        self.b.register_buffer("saw", self.a.seen)
        self.a.scale = self.b.scale = torch.ones(2)


def test_shared_parameters_stay_shared_after_a_move_to_the_meta_device() -> None:
    """Meta is such a device: torch creates new parameters there, one for each name."""
    torn = Shares().to("meta")
    assert torn.a.weight is not torn.b.weight
    model = Shares()
    models.move(model, torch.device("meta"))
    assert model.a.weight is model.b.weight
    assert isinstance(model.a.weight, nn.Parameter)
    assert model.a.seen is model.b.saw
    assert model.a.scale is model.b.scale
    assert {t.device.type for t in models.state(model).values()} == {"meta"}


def test_a_model_that_stays_where_it_is_keeps_its_tensors() -> None:
    model = Shares()
    weight, seen = model.a.weight, model.a.seen
    models.move(model, torch.device("cpu"))
    assert (model.a.weight is weight, model.b.weight is weight, model.b.saw is seen) == (True, True, True)
