"""Replayed tensors have the distribution of the constructor's own, and do not depend on earlier ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.parallel.deferred_init import constructor, fill
from launcher.parallel.deferred_init.replay import replay
from tests.parallel import makers


def again(build: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a model, each replayed alone."""
    model, recorded = constructor.record(build, seed)
    assert not constructor.unknown(model, recorded)
    assert all(t.is_meta for t in fill.tensors(model).values())
    return {n: replay(recorded.log, t, n, seed) for n, t in fill.tensors(model).items()}


@pytest.mark.parametrize("name", list(vars(makers.Inits())["_parameters"]))
def test_replayed_numbers_have_the_distribution_of_the_constructors(name):
    mine, real = again(makers.Inits)[name], getattr(constructor.build_in_memory(makers.Inits, 0), name).detach()
    assert mine.shape == real.shape
    size = real.std().item()
    assert abs(mine.mean() - real.mean()) <= 0.15 * size
    assert abs(mine.std() - real.std()) <= 0.15 * size
    assert abs(mine.min() - real.min()) + abs(mine.max() - real.max()) <= 4 * size


def test_replayed_numbers_keep_the_law_of_their_init():
    mine = again(makers.Inits)
    q = mine["orthogonal"]
    assert torch.allclose(q @ q.T, torch.eye(40), atol=1e-5)
    assert mine["trunc"].abs().max() <= 0.5
    assert ((mine["sparse"] == 0).sum(0) == 20).all()
    assert torch.equal(mine["eye"], torch.eye(40, 60))
    assert torch.equal(mine["dirac"], makers.Inits().dirac)


def test_numbers_that_are_written_down_are_kept():
    real = makers.Constants()
    mine = again(makers.Constants)
    assert mine.keys() == {n for n, _ in (*real.named_parameters(), *real.named_buffers())} | {"plain"}
    for name, t in mine.items():
        assert torch.equal(t, getattr(real, name)), name
        assert t.dtype == getattr(real, name).dtype


def test_an_init_by_apply_and_what_layers_do_by_themselves_are_kept():
    mine = again(makers.Applied)
    assert abs(mine["layers.0.weight"].std() - 0.3 / 20**0.5) < 0.01
    assert mine["layers.0.bias"].abs().max() <= 1 / 20**0.5
    assert (mine["embed.weight"][3] == 0).all()
    assert torch.equal(mine["head.weight"], mine["embed.weight"])
    assert torch.equal(mine["norm.running_var"], torch.ones(8))
    assert mine["norm.num_batches_tracked"].item() == 0
    assert not torch.equal(mine["layers.0.weight"], mine["layers.1.weight"])


def test_two_tensors_made_of_one_draw_agree():
    mine = again(makers.Copied)
    assert torch.equal(mine["online.weight"], mine["target.weight"])
    assert torch.equal(mine["online.bias"], mine["target.bias"])
    assert torch.equal(mine["right"], 2 * mine["left"])


def test_a_constructor_may_look_at_numbers_that_are_not_random():
    with torch.device("meta"):
        model, _ = constructor.record(makers.Looking)
    assert model.rates == makers.Looking().rates
    assert abs(again(makers.Looking)["w"].std() - 0.3) < 0.15


@pytest.mark.parametrize("maker", [makers.OnCpu, makers.Generators])
def test_numbers_do_not_depend_on_what_was_made_before(maker):
    first, second = again(maker), again(maker)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(abs(t.std() - 1) < 0.1 for n, t in first.items() if n != "older")


def test_a_generator_that_the_model_keeps_goes_on_after_the_draws_of_the_constructor():
    plain = makers.KeepsGenerators()
    model, recorded = constructor.record(makers.KeepsGenerators, 0)
    for name in ("first", "second", "third", "unused"):
        assert torch.equal(getattr(model, name).get_state(), getattr(plain, name).get_state()), name
    for name in ("c", "d"):
        assert torch.equal(replay(recorded.log, getattr(model, name), name, 0), getattr(plain, name)), name


def test_memory_is_allocated_without_another_call_of_the_models_own_apply():
    model, _ = constructor.record(makers.OwnApply)
    assert model.calls == 1  # as by model.to(device)
    fill._to_empty(model, torch.device("cpu"))
    assert model.calls == 1
    assert not any(t.is_meta for t in (*fill.tensors(model).values(), *model.lstm._flat_weights))


def test_parametrized_weights_are_consistent():
    mine = again(makers.Parametrized)
    v, g = mine["weight.parametrizations.weight.original1"], mine["weight.parametrizations.weight.original0"]
    assert torch.allclose(v.norm(dim=1, keepdim=True), g)
    assert torch.allclose(mine["spectral.parametrizations.weight.0._u"].norm(), torch.tensor(1.0))


def test_another_seed_makes_other_numbers():
    assert not torch.equal(again(makers.Copied, 0)["left"], again(makers.Copied, 1)["left"])


def test_the_default_dtype_of_the_recording_holds_when_replayed():
    with fill.default_dtype(torch.float64):
        model, recorded = constructor.record(makers.Inits)
    assert replay(recorded.log, model.normal, "normal", 0).dtype == torch.float64


@pytest.mark.parametrize("maker", [makers.FromNumpy, makers.RandomLook, makers.Orthogonal])
def test_numbers_that_torch_never_made_and_those_that_were_looked_at_are_kept(maker):
    mine = again(maker)
    assert all(torch.equal(t, again(maker)[n]) for n, t in mine.items())
    if maker is makers.FromNumpy:
        assert torch.equal(mine["table"], maker().table)
