"""Classifies parameters of a model: embedding tables, the head, adapters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import parametrize

from launcher.plan.operators.resolve import ADAPTED
from launcher.plan.values.facts import Role

ADAPTER = ("lora_A", "lora_B")


def param_roles(model: nn.Module) -> dict[int, Role]:
    """Return the roles of parameters by identity; a tied head is an embedding."""
    modules = dict(model.named_modules())
    lists = tuple(f"{n}." for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.ModuleDict))
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = [m for n, m in modules.items() if isinstance(m, nn.Linear) and not n.startswith(lists)]
    roles: dict[int, Role] = {id(p): "head" for m in linear[-1:] for p in m.parameters(recurse=False)}
    roles |= {id(p): "embedding" for m in tables for p in m.parameters(recurse=False)}
    beside = [m._parameters[n] for m in modules.values() if adapted(m) for n in ADAPTER]
    return roles | {id(p): "adapter" for p in beside}


def adapted(module: nn.Module) -> bool:
    """Whether a module is linear and has an adapter."""
    return isinstance(module, nn.Linear) and module._parameters.keys() >= {*ADAPTER}


def adds(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the function of an adapter of ``model.lora``, or ``None``.

    It takes the input and the adapter's two factors (full or pieces), and returns what the adapter adds. A
    user-defined class, which may do anything with the factors, has none.
    """
    found: Callable[[Tensor, Tensor, Tensor], Tensor] | None = getattr(module, "launcher_lora", None)
    return found if adapted(module) else None


ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip
NORMS = (nn.LayerNorm, nn.RMSNorm)


def kind_of(module: nn.Module) -> str:
    """Return the kind of a module that tensor parallelism can split, or "".

    A subclass with another forward has no such kind.
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
    """Whether it is a table whose rows, or their gradients, depend on everything that is looked up."""
    return isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq)
