"""torch 2.11's pipeline stage, made to behave as 2.12's: values between stages need not be floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage


class Torch211Stage(PipelineStage):
    """The stage of torch 2.11, where values that take no gradient cross too.

    Its own checks of shapes know one shape only, and sequences are cut in pieces; ours are
    made after each forward.
    """

    inputs_meta: tuple[torch.Tensor, ...]
    args_recv_info: dict[int, tuple[Any, ...]]
    has_backward: bool
    group_rank: int
    get_outputs_meta: Callable[[], tuple[torch.Tensor, ...]]

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """Two neighbours on one rank hand over what they have; torch would have the rank greet itself."""
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

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """What is sent is kept until the step is over; its graph is not to be."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.detach()
        return ops

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: the inputs of the first stage were cut from a batch of the planned size."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Nothing: ``forward_one_chunk`` compares them with the plan."""


if TYPE_CHECKING or hasattr(PipelineStage, "_setup_forward_recv_info"):  # noqa: SIM108 (mypy wants it so)
    Base = PipelineStage
else:
    Base = Torch211Stage
