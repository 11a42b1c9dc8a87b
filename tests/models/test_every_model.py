"""What every model of this package guarantees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.job.schema.components import Model
from launcher.job.schema.models import AutoParallelMLP, LanguageModel, ResNet, TiedPair
from launcher.models.build import build_model
from launcher.objective.losses import cross_entropy

LM: dict[str, Any] = {"name": "lm", "vocab_size": 17, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}
MODELS: dict[str, Model] = {
    "lm": LanguageModel(**LM),
    "lm-untied": LanguageModel(**LM, tied=False),
    "resnet18": ResNet(name="resnet", depth=18, width=4),
    "resnet50": ResNet(name="resnet", depth=50, width=4, stem="imagenet"),
    "mlp": AutoParallelMLP(name="mlp", features=12, hidden=8),
    "tied_pair": TiedPair(name="tied_pair", vocab_size=17, dim=8),
}
every_model = pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)


def batch(settings: Model) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    if isinstance(settings, LanguageModel | TiedPair):
        tokens = torch.randint(17, (2, 7), generator=g)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (2, 3, 32, 32) if isinstance(settings, ResNet) else (2, 3, 2, 2)
    return torch.randn(shape, generator=g), torch.randint(10, (2,), generator=g)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Dtypes(TorchDispatchMode):
    """Collects the floating-point dtypes of the outputs of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.seen |= {t.dtype for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()}
        return out


@every_model
def test_fp64_stays_fp64_forward_and_backward(settings):
    with default_dtype(torch.float64):
        model = build_model(settings)
        x, y = batch(settings)
        with Dtypes() as found:
            cross_entropy(model(x.double() if x.is_floating_point() else x), y).backward()
    assert found.seen == {torch.float64}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


@every_model
def test_it_runs_in_bf16_and_the_loss_is_fp32(settings):
    model = build_model(settings).bfloat16()
    x, y = batch(settings)
    loss = cross_entropy(model(x.bfloat16() if x.is_floating_point() else x), y)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()


@every_model
def test_it_is_built_on_meta_with_the_same_names_and_shapes(settings):
    with torch.device("meta"):
        meta = build_model(settings)
    assert {t.device.type for t in meta.state_dict().values()} == {"meta"}
    here = build_model(settings).state_dict()
    assert {n: t.shape for n, t in meta.state_dict().items()} == {n: t.shape for n, t in here.items()}


def owners(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that have parameters which no earlier module has."""
    seen: set[int] = set()
    for module in model.modules():
        own = {id(p) for p in module.parameters(recurse=False)}
        if own - seen:
            yield module
        seen |= own


@every_model
def test_the_constructor_is_nothing_but_reset_parameters_of_each_module(settings):
    torch.manual_seed(3)
    built = build_model(settings).state_dict()
    torch.manual_seed(4)
    model = build_model(settings)
    assert any(not torch.equal(t, built[n]) for n, t in model.state_dict().items())
    torch.manual_seed(3)
    for module in owners(model):
        module.reset_parameters()
    assert all(torch.equal(t, built[n]) for n, t in model.state_dict().items())


@every_model
def test_a_module_resets_its_own_parameters_only(settings):
    model = build_model(settings)
    for name, module in [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]:
        before = {n: t.clone() for n, t in model.state_dict().items()}
        own = {id(p) for p in module.parameters(recurse=False)} | {id(b) for b in module.buffers(recurse=False)}
        module.reset_parameters()
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        changed = [n for n, t in tensors.items() if not torch.equal(t, before[n])]
        assert all(id(tensors[n]) in own for n in changed), name


@pytest.mark.parametrize("settings", [MODELS["lm"], MODELS["tied_pair"]], ids=["lm", "tied_pair"])
def test_a_tied_table_is_one_parameter(settings):
    with torch.device("meta"):
        model = build_model(settings)
    assert model.head.weight is model.embed.weight
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert {"head.weight", "embed.weight"} <= set(names)
