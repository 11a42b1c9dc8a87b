"""Adapters beside linear modules: what is trained, how they are initialized, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import RequestError
from launcher.job.schema.models import LanguageModel, Lora
from launcher.models.build import build_model
from launcher.models.lora import adapt

LM: dict[str, Any] = {"name": "lm", "vocab_size": 17, "dim": 16, "layers": 2, "heads": 4}


def built(lora: Lora | None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(LanguageModel(**LM, lora=lora))


def lora(modules: Any, rank: int = 2, alpha: float = 3) -> Lora:
    return Lora(rank=rank, alpha=alpha, modules=modules)


def test_an_adapted_model_starts_equal_and_trains_only_its_adapters() -> None:
    plain, adapted = built(None), built(lora("layers.*.attn.[qv]"))
    tokens = torch.randint(17, (2, 5))
    assert torch.equal(adapted(tokens), plain(tokens))
    named = dict(adapted.named_parameters())
    assert {n: p for n, p in named.items() if not p.requires_grad}.keys() == dict(plain.named_parameters()).keys()
    learns = {n: tuple(p.shape) for n, p in named.items() if p.requires_grad}
    assert learns == {
        f"layers.{i}.attn.{m}.lora_{ab}": shape
        for i in (0, 1) for m in "qv" for ab, shape in (("A", (2, 16)), ("B", (16, 2)))
    }  # fmt: skip
    a = named["layers.0.attn.q.lora_A"]
    assert 0 < a.abs().max() <= 16**-0.5  # as kaiming_uniform_ with a = sqrt(5) does, which PEFT uses
    assert not named["layers.0.attn.q.lora_B"].any()


def test_an_adapter_adds_alpha_over_rank_times_its_product() -> None:
    net = adapt(nn.Sequential(nn.Linear(5, 3)), lora("0", rank=4, alpha=6))
    base = nn.Linear(5, 3)
    base.load_state_dict({n: t for n, t in net[0].state_dict().items() if "lora" not in n})
    with torch.no_grad():
        net[0].lora_B.normal_()
        merged = base.weight + 1.5 * net[0].lora_B @ net[0].lora_A
    x = torch.randn(2, 5)
    torch.testing.assert_close(net(x), x @ merged.T + base.bias)


@pytest.mark.parametrize(("modules", "count"), [
    ("*", 15), (("q", "attn.v"), 4), ("attn", 8),
    ("layers", 14), ("layers.1", 7), (("layers.0.attn", "*.up"), 6), ("layers.?.mlp.*", 6),
], ids=str)  # fmt: skip
def test_a_name_or_the_end_of_names_is_of_all_below_it_and_globs_are_too(modules: Any, count: int) -> None:
    assert sum(n.endswith("lora_A") for n, _ in built(lora(modules)).named_parameters()) == count


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize(("net", "modules", "told"), [
    (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1", "1: it names no linear module; linear modules: 0"),
    (nn.Sequential(nn.ReLU()), "*", "*: it names no linear module; the model has none"),
    (nn.Sequential(Odd(2, 2)), "*", "0: Odd does more than a linear module; remove it from the list"),
    (hooked(), "*", "0: it has hooks, which would be lost; remove it from the list"),
], ids=["no linear", "none at all", "a forward of its own", "hooks"])  # fmt: skip
def test_modules_that_cannot_have_an_adapter_are_refused(net: nn.Module, modules: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        adapt(net, lora(modules))
    assert str(refused.value) == f"model.lora.modules: {told}"


def test_a_module_of_two_names_has_one_adapter() -> None:
    shared = nn.Linear(2, 2)
    net = adapt(nn.Sequential(shared, nn.ReLU(), shared), lora("*"))
    assert net[0] is net[2]
    assert sum(p.requires_grad for p in net.parameters()) == 2
