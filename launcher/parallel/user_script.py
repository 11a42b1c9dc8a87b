"""``launcher.parallel.parallelize``: applies a plan to a model in a user's own script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.errors import RunError
from launcher.parallel import mesh, parallel_model
from launcher.parallel.deferred_init import fill
from launcher.parallel.parallel_model import ParallelModel, blueprint
from launcher.plan.plan import Plan


class Net(nn.Module):
    """A module with this rank's stages in ``stages``.

    ``live`` is the model that ``launcher.runtime.training.pipeline.PipelineRuntime`` trains.
    """

    def __init__(self, live: ParallelModel) -> None:
        super().__init__()
        self.stages = nn.ModuleList(part.module for part in live.parts)
        self.live = live

    def forward(self, *inputs: Any) -> Any:
        """Runs the model if it is one stage. Raises ``RuntimeError`` for a pipeline.

        Raises ``RunError`` if the forward changed weights in a way that the other ranks cannot follow.
        """
        count = len(self.live.plan.stages)
        if count > 1:
            runner = "launcher.runtime.training.pipeline.PipelineRuntime(net.live, ...)"
            raise RuntimeError(f"net: it is one of {count} stages; run them with {runner}")
        out = self.stages[0](*inputs)
        if text := self.live.changes.take(any_difference=self.live.changes.unread):
            raise RunError(text)
        return out

    def copies(self) -> dict[str, tuple[Tensor, ...]]:
        """Returns this rank's parameters and buffers by first name.

        A tied tensor has one entry for each copy that this rank holds.
        """
        out: dict[str, tuple[Tensor, ...]] = {}
        for part in self.live.parts:
            for p, _, t in part.named(self.live.plan.params):
                if all(t is not other for other in out.get(p.name, ())):
                    out[p.name] = (*out.get(p.name, ()), t)
        return out


def parallelize(model: nn.Module | Callable[[], nn.Module], plan: Plan) -> Net:
    """Returns this rank's part of ``model``, laid out by ``plan``.

    Every rank of the process group calls this.

    If ``model`` is a function that builds the model, its weights are initialized from ``plan.seed``, shard by
    shard. If it is a module, its values are kept, and it must not be used afterwards. Raises ``ValueError``
    if the group and the plan differ in the number of ranks, or if the module is on the meta device.
    """
    ranks, world = plan.sizes.grid.size, dist.get_world_size()
    if world != ranks:
        raise ValueError(f"plan: it has {ranks} ranks, but the process group has {world}")
    device = _device()

    # the model on the meta device, and the source of its values
    if isinstance(model, nn.Module):
        full_tensor = _numbers(model)
        _empty(model)
    else:
        model, full_tensor = fill.from_constructor(model, plan)

    # this rank's part of it
    meshes = mesh.build(plan.sizes.grid, device.type, plan.ties)
    drawn = blueprint(model, full_tensor, plan, plan.inputs)
    return Net(parallel_model.parallelize(drawn, plan, meshes, device))


def _device() -> torch.device:
    """Returns the accelerator if the process group has its default backend, otherwise the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    if kind is None or own is None or f"{kind.type}:{own}" not in dist.get_backend_config().split(","):
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _numbers(model: nn.Module) -> fill.FullTensorOf:
    real = fill.tensors(model)
    lost = [name for name, t in real.items() if t.is_meta]
    if lost:
        text = f"model: {lost[0]} is on the meta device and has no values"
        raise ValueError(f"{text}; pass a function that builds the model")
    return lambda name: real[name].detach().cpu()


def _empty(model: nn.Module) -> None:
    """Replaces real tensors by meta tensors in place; ``model.to("meta")`` would untie tied parameters."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, t in slots.items():
                if t is None:
                    continue
                bare = torch.empty_like(t, device="meta")
                if isinstance(t, nn.Parameter):
                    bare = nn.Parameter(bare, t.requires_grad)
                made.setdefault(id(t), bare)
                slots[name] = made[id(t)]  # type: ignore[assignment]


def sync_pipeline_shared_parameters(net: nn.Module) -> None:
    """Copies every parameter that stages share from the first stage to the others.

    Does nothing if there is one stage. ``net`` is a model that ``parallelize`` returned, or a module around
    it. Every rank calls this. Raises ``TypeError`` for anything else.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: {type(net).__name__} is not a torch.nn.Module")
    parallel_net = parallel_model_in(net)
    if parallel_net is None:
        text = f"net: {type(net).__name__} is not a result of launcher.parallel.parallelize"
        raise TypeError(f"{text}, nor a wrapper of one")
    for tied in parallel_net.live.ties:
        tied.sync()


def parallel_model_in(net: nn.Module) -> Net | None:
    """Returns the first parallel model in ``net``, itself included."""
    return next((m for m in net.modules() if isinstance(m, Net)), None)
