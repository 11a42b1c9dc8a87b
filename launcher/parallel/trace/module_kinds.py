"""Kinds of modules that tensor parallelism can split."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import parametrize

from launcher.plan.tensor_parallel.module_strategies import ADAPTED

ADAPTER = ("lora_A", "lora_B")


def adapted(module: nn.Module) -> bool:
    """Returns true for a linear module with an adapter."""
    return isinstance(module, nn.Linear) and module._parameters.keys() >= {*ADAPTER}


def adds(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Returns the function of an adapter of ``model.lora``, or ``None``.

    It takes the input and the adapter's two factors (full or pieces), and returns what the adapter adds. A
    user-defined class, which may do anything with the factors, has none.
    """
    function: Callable[[Tensor, Tensor, Tensor], Tensor] | None = getattr(module, "launcher_lora", None)
    return function if adapted(module) else None


ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip


NORMS = (nn.LayerNorm, nn.RMSNorm)


def kind_of(module: nn.Module) -> str:
    """Returns the kind of a module that tensor parallelism can split, or "".

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
    """Returns true for a table whose rows, or gradients, depend on all ids of the batch."""
    return isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq)


def is_mean_over_samples(module: nn.Module, attr: str) -> bool:
    """Returns true if a buffer of ``module`` is a statistic that torch's InstanceNorm keeps."""
    norm = nn.modules.instancenorm._InstanceNorm
    own = isinstance(module, norm) and type(module).forward is norm.forward
    return own and attr in ("running_mean", "running_var")
