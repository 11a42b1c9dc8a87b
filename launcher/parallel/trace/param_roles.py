"""What parameters are to a model: tables of embeddings, the head, adapters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import parametrize

from launcher.plan.operators.resolve import ADAPTED
from launcher.plan.values.facts import Role

ADAPTER = ("lora_A", "lora_B")


def param_roles(model: nn.Module) -> dict[int, Role]:
    """Of parameters, by identity: what is both is an embedding."""
    modules = dict(model.named_modules())
    lists = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.ModuleDict))
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = [m for n, m in modules.items() if isinstance(m, nn.Linear) and not n.startswith(lists)]
    roles: dict[int, Role] = {id(p): "head" for m in linear[-1:] for p in m.parameters(recurse=False)}
    roles |= {id(p): "embedding" for m in tables for p in m.parameters(recurse=False)}
    beside = [m._parameters[n] for m in modules.values() if adapted(m) for n in ADAPTER]
    return roles | {id(p): "adapter" for p in beside}


def adapted(module: nn.Module) -> bool:
    """Whether it is linear, and has an adapter beside it."""
    return isinstance(module, nn.Linear) and module._parameters.keys() >= {*ADAPTER}


def adds(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Of an adapter of ``model.lora``: what it adds, given the input and its two factors, whole or pieces.

    ``None`` of a class of the user's own, which may do anything with them.
    """
    found: Callable[[Tensor, Tensor, Tensor], Tensor] | None = getattr(module, "launcher_lora", None)
    return found if adapted(module) else None


ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip
NORMS = (nn.LayerNorm, nn.RMSNorm)


def kind_of(module: nn.Module) -> str:
    """What tensor parallelism knows how to cut, or "".

    A subclass with a forward of its own is something else.
    """
    kind = _plain_kind(module)
    if adapted(module):
        return ADAPTED if adds(module) else f"{ADAPTED} of its own"
    if "forward" in vars(module):
        return f"{kind} with a forward of its own" if kind else ""
    return f"parametrized {kind}" if kind and parametrize.is_parametrized(module) else kind


def _plain_kind(module: nn.Module) -> str:
    for kind, classes in (("linear", (nn.Linear,)), ("embedding", (nn.Embedding,)), ("norm", NORMS)):
        if isinstance(module, classes) and type(module).forward in [c.forward for c in classes]:
            return "" if _limited(module) else kind
    return "elementwise" if isinstance(module, ELEMENTWISE) else ""


def _limited(module: nn.Module) -> bool:
    """Whether it is a table whose rows, or their gradients, depend on all that is looked up."""
    return isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq)
