"""A recorded constructor makes what a plain ``Model()`` makes, also after a move, or says why it cannot be recorded."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from launcher.errors import RequestError
from launcher.parallel.deferred_init import constructor
from launcher.parallel.deferred_init.compare_builds import differing
from launcher.parallel.deferred_init.replay import replay
from launcher.parallel.deferred_init.uninitialized import problems
from launcher.parallel.dispatch.modes import default_dtype
from tests.parallel import constructors, unrecorded


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor by name, plain attributes too, found without the code under test."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        plain = {n: t for n, t in vars(module).items() if isinstance(t, torch.Tensor)}
        named |= {f"{path}.{n}".lstrip("."): t for n, t in plain.items()}
    return {n: t.detach() for n, t in named.items()}


def seeding(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A constructor that seeds torch first, so that its numbers are determined to the bit."""

    def build() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return build


def plain(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    constructors.mask.cache_clear()  # which a recording has filled
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return build()


@pytest.mark.parametrize("maker", constructors.EXACT, ids=lambda m: m.__name__)
def test_a_replayed_constructor_is_bit_equal_to_a_plain_construction(maker):
    build = seeding(maker)
    model, recorded = constructor.record(build, 5)
    assert recorded.why == ""
    assert not problems(build, model, recorded)
    want, meta = tensors(plain(build, 5)), tensors(model)
    assert list(meta) == list(want) or sorted(meta) == sorted(want)
    for name, t in meta.items():
        assert t.is_meta
        made = replay(recorded.log, t, name, 5)
        assert made.dtype == want[name].dtype
        assert torch.equal(made, want[name]), name


@pytest.mark.parametrize("maker", constructors.EXACT, ids=lambda m: m.__name__)
def test_without_a_seed_of_its_own_the_path_is_the_same_and_the_numbers_are_alike(maker):
    model, recorded = constructor.record(maker, 5)
    want, meta = tensors(plain(maker, 5)), tensors(model)
    assert sorted(meta) == sorted(want)
    for name, t in meta.items():
        made, other = replay(recorded.log, t, name, 5), want[name]
        # what Looks picks depends on random numbers; the bits of OtherDtypes have no distribution
        if maker in (constructors.Looks, constructors.OtherDtypes):
            continue
        assert made.shape == other.shape
        if made.is_floating_point() and made.numel() >= 300:
            size = other.std().item()
            assert abs(made.std().item() - size) <= 0.25 * size, name
            assert abs((made.mean() - other.mean()).item()) <= 0.3 * size, name


@pytest.mark.parametrize("maker", constructors.EXACT, ids=lambda m: m.__name__)
def test_a_replay_equals_a_plain_construction_with_the_same_draws(maker):
    model, recorded = constructor.record(maker, 5)
    constructors.mask.cache_clear()
    assert differing(maker, model, recorded) == ""


def test_a_replay_that_differs_from_the_constructor_is_reported():
    model, recorded = constructor.record(constructors.LooksAtStrides, 5)
    assert recorded.why == ""
    assert differing(constructors.LooksAtStrides, model, recorded) == "gives b other values when it is replayed"


def test_attributes_of_modules_are_those_of_a_plain_construction():
    model, _ = constructor.record(constructors.OtherSources, 5)
    assert model.width == plain(constructors.OtherSources, 5).width
    model, _ = constructor.record(seeding(constructors.Looks), 5)
    assert model.same is True
    model, _ = constructor.record(seeding(constructors.Numpy), 5)
    assert model.scale == plain(seeding(constructors.Numpy), 5).scale


def test_equal_seeds_make_equal_layers():
    model, recorded = constructor.record(constructors.Seeds, 5)
    made = {n: replay(recorded.log, t, n, 5) for n, t in tensors(model).items()}
    for a, b in ("ab", "cd"):
        assert torch.equal(made[f"{a}.weight"], made[f"{b}.weight"])
    assert not torch.equal(made["a.weight"], made["c.weight"])


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("maker", unrecorded.WHOLE, ids=lambda m: m.__name__)
def test_a_constructor_that_cannot_be_recorded_is_built_in_full_with_the_reason(maker, seed):
    model, recorded = constructor.record(maker, seed)
    assert recorded.why == unrecorded.WHOLE[maker]
    assert not problems(maker, model, recorded)
    assert constructor.unknown(model, recorded) == list(tensors(model))
    want, real = tensors(plain(maker, seed)), tensors(constructor.build_in_memory(maker, seed))
    assert all(torch.equal(real[n], want[n]) for n in want)


def test_a_whole_build_is_the_plain_one_and_leaves_the_streams_where_they_were():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    want = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    constructor.record(constructors.OtherSources, 5)
    made = tensors(constructor.build_in_memory(constructors.OtherSources, 5))
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == want
    assert all(torch.equal(made[n], t) for n, t in tensors(plain(constructors.OtherSources, 5)).items())


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_the_default_device_outside_does_not_count(default):
    with torch.device(default):
        model, recorded = constructor.record(seeding(constructors.AsksTheDefaultDevice), 5)
    assert recorded.why == ""
    want = tensors(plain(seeding(constructors.AsksTheDefaultDevice), 5))
    assert torch.equal(replay(recorded.log, model.weight, "weight", 5), want["weight"])


@pytest.mark.parametrize("build", [unrecorded.Sparse, unrecorded.SparseAttribute])
def test_a_sparse_tensor_is_refused(build):
    with pytest.raises(RequestError) as error:
        constructor.record(build)
    assert str(error.value) == (
        "model: links is sparse_coo, and the launcher initializes, sends and saves dense tensors only; "
        "register its dense parts as buffers, and build it from them in the forward"
    )


def test_a_module_that_does_something_of_its_own_when_it_is_moved_is_as_after_a_move():
    """Training loops call ``module.to(device)`` first, so the plan must know the dtypes after that call."""
    with default_dtype(torch.float64):
        model, recorded = constructor.record(constructors.KeepsFloat32, 5)
        want = constructors.KeepsFloat32().to("cpu")
        assert not differing(constructors.KeepsFloat32, model, recorded)
    assert recorded.why == ""
    assert (model.f.dtype, model.lin.weight.dtype) == (torch.float32, torch.float64)
    assert torch.equal(replay(recorded.log, model.f, "f", 5), want.f)
