"""Hides the differences between the pipeline stages of the supported torch versions.

In torch 2.11 every value between stages had to be floating-point. Since 2.15 a receive buffer is made when it
is needed, and an output is dropped once it is sent: its graph edge stays for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import PipelineStage


class Torch211Stage(PipelineStage):
    """The stage of torch 2.11, extended to send values that need no gradient.

    torch's own shape checks expect a single shape, but sequence chunks differ; ours run after each forward.
    """

    inputs_meta: tuple[torch.Tensor, ...]
    args_recv_info: dict[int, tuple[Any, ...]]
    grad_recv_info: dict[int, tuple[Any, ...]]
    has_backward: bool
    group_rank: int
    get_outputs_meta: Callable[[], tuple[torch.Tensor, ...]]

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """Leaves out stages on the same rank, which pass values directly: the rank would send to itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        training, self.has_backward = self.has_backward, False  # torch would set requires_grad on integers
        made = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = training
        return made

    def _create_grad_recv_info(self, *args: Any) -> Any:
        infos = super()._create_grad_recv_info(*args)
        for info, meta in zip(infos, self.get_outputs_meta(), strict=False):  # the last stage has none
            if not meta.requires_grad:
                info.buffer = None
        return infos

    def _get_recv_ops(self, infos: Any) -> Any:
        return super()._get_recv_ops(tuple(i for i in infos if getattr(i, "buffer", None) is not None))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        training = self.has_backward and torch.is_grad_enabled()
        infos = zip(self.args_recv_info[fwd_chunk_id], self.inputs_meta, strict=True)
        return tuple(i.buffer.requires_grad_(training and meta.requires_grad) for i, meta in infos)

    def set_local_bwd_input(self, grads: tuple[torch.Tensor | None, ...], chunk: int) -> None:
        for info, grad in zip(self.grad_recv_info[chunk], grads, strict=True):
            info.buffer = grad

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """Detaches what is sent: torch keeps it until the step ends, which must not keep the graph."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.detach()
        return ops

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Does nothing: the inputs of the first stage come from a batch of the planned size."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Does nothing: ``forward_one_chunk`` compares the outputs with the plan."""


if TYPE_CHECKING or hasattr(PipelineStage, "_setup_forward_recv_info"):  # noqa: SIM108 (mypy wants it so)
    Base = PipelineStage
else:
    Base = Torch211Stage


def outputs_kept(stage: Any, chunk: int) -> tuple[torch.Tensor | GradientEdge, ...]:
    """Returns the tensors or graph edges from which the backward of a micro batch starts."""
    if hasattr(stage, "_forward_chunk_states"):
        edges: tuple[torch.Tensor | GradientEdge, ...]
        edges = stage._forward_chunk_states[chunk].stage_output_for_backward()
        return edges
    outputs: tuple[torch.Tensor, ...] = stage.fwd_cache[chunk][0]
    return outputs


def resize(info: Any, meta: torch.Tensor) -> None:
    """Gives a receive buffer the shape of ``meta``."""
    if info.buffer is not None:
        info.buffer = info.buffer.new_empty(meta.shape)
    elif getattr(info, "tensor_meta", None) is not None:
        info.tensor_meta = replace(info.tensor_meta, shape=meta.shape, stride=meta.stride())
