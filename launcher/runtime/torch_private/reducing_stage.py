"""A pipeline stage of torch that reduces sharded gradients once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining._backward import stage_backward

from launcher.errors import RunError
from launcher.parallel.fsdp.gather import GatherOrder, Prefetch
from launcher.parallel.fsdp.reduce import ReduceOrder
from launcher.parallel.fsdp.shard import end_backward, finish_reductions, param_groups
from launcher.parallel.sequence_chunks import Carry
from launcher.parallel.split_backward import Deferral, DeferredProduct
from launcher.runtime.torch_private.stage_by_torch_version import Base, outputs_kept, resize

Metas = Sequence[tuple[torch.Tensor, ...]]


class ReducingStage(Base):
    """A stage whose sharded gradients are reduced once a step, or (``reduce_each``) after every micro batch.

    torch's own stage keeps them unsharded until the last micro batch, whatever FSDP2 is set to.
    ``reshard_each``: weights are resharded after every backward too. ``collect`` is called after every
    backward. If sequences are divided, a micro batch of torch is a chunk of one of ours: ``takes`` and
    ``sends`` have the meta tensors of every chunk in turn, and ``carry`` tells modules which chunk runs.
    ``order`` keeps the collectives of the weights in the plan's order, ``prefetch`` gathers the weights
    before they are used, and ``reductions`` does the reductions that run once a step.
    """

    def __init__(
        self,
        *args: Any,
        reduce_each: bool,
        reshard_each: bool,
        collect: Callable[[], None],
        takes: Metas,
        sends: Metas,
        carry: Carry | None,
        order: GatherOrder,
        prefetch: Prefetch,
        reductions: ReduceOrder,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"input_args": takes[0], "output_args": sends[0]}
        super().__init__(*args, **kwargs)
        self.reduce_each = reduce_each
        self.reshard_each = reshard_each
        self.collect = collect
        self.takes = takes
        self.sends = sends
        self.carry = carry
        self.order = order
        self.prefetch = prefetch
        self.reductions = reductions
        self.deferral: Deferral | None = None
        self.products: dict[int, list[DeferredProduct]] = {}

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.products.clear()  # a failed step may leave some

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        if not self.is_first:
            _resize(self.args_recv_info, self.takes)
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        if not self.is_last:
            _resize(self.grad_recv_info, self.sends)
        return made

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """Sends no gradient for inputs that need none."""
        if self.has_backward and not self.is_first:
            takes = self.takes[bwd_chunk_id % len(self.takes)]
            before = self.stage_index - 1
            self.grad_send_info = [before if t.requires_grad else None for t in takes]
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs a full backward; without ``full_backward`` it defers weight gradients to ``products``.

        Gradients that are sent back are made contiguous. A missing gradient is sent as zeros: torch itself
        would fail, send that of the first chunk, or read a stale one within a rank.
        """
        # the backward itself
        outputs = outputs_kept(self, bwd_chunk_id) if loss is None else (loss,)
        with ExitStack() as around:
            if not full_backward:
                assert self.deferral is not None
                self.products[bwd_chunk_id] = around.enter_context(self.deferral.deferring(outputs))
            if full_backward and last_backward:
                around.enter_context(self.reductions.last_backward(bwd_chunk_id))
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
        if loss is not None:
            loss.detach_()  # torch keeps it until the step ends, and with it the graph

        # afterwards: make gradients contiguous, collect those of half-precision weights, forget carried state
        if not self.is_first:
            takes = self.takes[bwd_chunk_id % len(self.takes)]
            pairs = zip(self.bwd_cache[bwd_chunk_id], takes, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(self._gradient(g, t) for g, t in pairs)
        self.collect()
        if self.carry is not None:
            self.carry.forget(*divmod(bwd_chunk_id, len(self.takes)))

    def _gradient(self, grad: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor | None:
        if grad is None and of.requires_grad:
            return torch.zeros_like(of, device=self.device, requires_grad=False)
        return None if grad is None else grad.contiguous()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Raises ``RunError`` if an output differs from the plan: the receiver would silently misread it."""
        # run the forward in all of its contexts
        micro, piece = divmod(fwd_chunk_id, len(self.sends))
        with ExitStack() as around:
            around.enter_context(self.prefetch.forward(self.stage_index))
            around.enter_context(self.order.forward())
            if self.has_backward:
                around.enter_context(self.reductions.forward(fwd_chunk_id))
            if self.carry is not None:
                around.enter_context(self.carry.running(micro, piece))
            if self.deferral is not None:
                around.enter_context(self.deferral.running(args[0] if args else ()))
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        # check that the outputs are what the next stage expects
        if not self.is_last:
            for got, planned in zip(out, self.sends[piece], strict=True):
                if (got.shape, got.dtype) != (planned.shape, planned.dtype):
                    text = f"passes on {_spec(got)}, but the plan expects {_spec(planned)}"
                    why = "shapes and dtypes between stages must not depend on the data"
                    raise RunError(f"stage {self.stage_index} {text}; {why}")
        return out

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Computes the products that the first half of the backward deferred."""
        for product in self.products.pop(bwd_chunk_id):
            product.add()
        if isinstance(self.submod, FSDPModule):
            self._after(self.submod, last_backward)
        self.collect()

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        module = self.submod
        first_half = self.deferral is not None and self.deferral.queue is not None
        if first_half or not (self.reduce_each and isinstance(module, FSDPModule)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(self.reshard_each)
        module.set_requires_gradient_sync(True)  # then FSDP2's own hooks reduce
        module.set_requires_all_reduce(last_backward)  # over replicas it is enough to sum once
        with self.order.backward():
            made = stage_backward(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
            )
        finish_reductions(fully_shard.state(module))  # type: ignore[attr-defined]
        return made, None

    def perform_reduce_grad(self, *args: Any) -> None:
        """Starts the once-a-step reductions after the last backward; torch then only reshards weights."""
        self.reductions.flush()
        super().perform_reduce_grad(*args)

    def start_gradient_reduction(self) -> None:
        """Replaces ``perform_reduce_grad`` since torch 2.15, which waits for it in a second call."""
        self.reductions.flush()
        super().start_gradient_reduction()  # type: ignore[misc]

    def _after(self, module: FSDPModule, last: bool) -> None:
        """Does what FSDP2's hooks do at the end of a backward, for gradients that no backward computed.

        The weights stay gathered.
        """
        module.set_is_last_backward(self.reduce_each)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(self.reduce_each)
        if self.reduce_each:
            module.set_requires_all_reduce(last)
        with self.order.filling() if self.reduce_each else nullcontext():
            for group in _groups(module):
                group.post_backward()
        end_backward(fully_shard.state(module))  # type: ignore[attr-defined]

    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing: static metadata needs no cleanup; torch would drop gradients, also in evaluation."""


def _groups(module: FSDPModule) -> Iterator[Any]:
    """Yields FSDP2's parameter groups, including those of submodules."""
    root = fully_shard.state(module)  # type: ignore[attr-defined]
    return (group for state in root._state_ctx.all_states for group in param_groups(state))


def _resize(received: dict[int, Any], metas: Metas) -> None:
    """Resizes receive buffers to each chunk's size, if there is more than one chunk."""
    if len(metas) == 1:
        return
    for chunk, infos in received.items():
        for info, meta in zip(infos, metas[chunk % len(metas)], strict=True):
            resize(info, meta)


def _spec(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
