"""torch's pipeline stage, with the manners of torch 2.12 on 2.11 too: there, every value that crossed was a float."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage


class Older(PipelineStage):
    """The stage of torch 2.11: values that take no gradient cross too, and a gradient that is missing is sent as zeros.

    Its own checks of shapes know one shape only, and sequences are cut in pieces; ours are made after each forward.
    """

    inputs_meta: tuple[torch.Tensor, ...]
    args_recv_info: dict[int, tuple[Any, ...]]
    grad_recv_info: dict[int, tuple[Any, ...]]
    bwd_cache: dict[int, tuple[torch.Tensor | None, ...]]
    has_backward: bool
    get_outputs_meta: Callable[[], tuple[torch.Tensor, ...]]

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """Without those that go from a rank to itself, which gloo refuses: two neighbours on it need none."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        training, self.has_backward = self.has_backward, False  # torch would ask integers for a gradient
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

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        out = prev_stage_outputs if isinstance(prev_stage_outputs, tuple) else (prev_stage_outputs,)
        for info, tensor in zip(self.args_recv_info[mb_index], out, strict=True):
            info.buffer = tensor.detach()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        for info, grad in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if grad is not None:
                info.buffer = grad
            elif info.buffer is not None:
                info.buffer = torch.zeros_like(info.buffer)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_first:
            wants = [meta.requires_grad for meta in self.inputs_meta]
            self.grad_send_info = [self.stage_index - 1 if w else None for w in wants]
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(meta, device=self.device, requires_grad=False) if w and g is None else g
                for g, meta, w in zip(self.bwd_cache[bwd_chunk_id], self.inputs_meta, wants, strict=True)
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: the inputs of the first stage were cut from a batch of the planned size."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Nothing: ``forward_one_chunk`` compares them with the plan."""


if TYPE_CHECKING or hasattr(PipelineStage, "_setup_forward_recv_info"):  # noqa: SIM108 (mypy wants it so)
    Base = PipelineStage
else:
    Base = Older
