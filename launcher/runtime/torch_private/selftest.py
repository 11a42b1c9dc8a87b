"""Checks at the start that the private parts of torch exist."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from launcher.errors import Problem, RequestError

SUPPORTED = ">=2.11,<2.16"

SET_TIMEOUT = "set_timeout" if hasattr(torch.distributed, "set_timeout") else "_set_pg_timeout"
"""Public since torch 2.14, which warns about the earlier name."""

PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("torch.distributed.pipelining.schedules", "_Action",
     ("stage_index", "computation_type", "microbatch_index")),
    ("torch.distributed.pipelining.schedules", "_ComputationType.FORWARD", ()),
    ("torch.distributed.pipelining.schedules", "_ComputationType.FULL_BACKWARD", ()),
    ("torch.distributed.pipelining.schedules", "_ComputationType.BACKWARD_INPUT", ()),
    ("torch.distributed.pipelining.schedules", "_ComputationType.BACKWARD_WEIGHT", ()),
    ("torch.distributed.pipelining.schedules", "_add_send_recv",
     ("compute_actions", "stage_to_rank", "num_stages")),
    ("torch.distributed.pipelining.schedules", "_add_reduce_grad", ("actions", "n_microbatches")),
    ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime._assert_unsharded", ("stage",)),
    ("torch.distributed.pipelining.schedules", "PipelineScheduleMulti.__init__", ("loss_fn", "scale_grads")),
    ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime.step", ("target", "return_outputs")),
    ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime._prepare_schedule_with_comms",
     ("actions", "format")),
    ("torch.distributed.pipelining", "PipelineStage.__init__", ("input_args", "output_args", "group")),
    ("torch.distributed.pipelining", "PipelineStage.forward_one_chunk", ("fwd_chunk_id",)),
    ("torch.distributed.pipelining", "PipelineStage.backward_maybe_with_nosync",
     ("backward_type", "bwd_kwargs", "last_backward")),
    ("torch.distributed.pipelining", "PipelineStage.backward_one_chunk", ()),
    ("torch.distributed.pipelining", "PipelineStage.backward_weight_one_chunk", ()),
    ("torch.distributed.fsdp", "MixedPrecisionPolicy",
     ("param_dtype", "reduce_dtype", "cast_forward_inputs")),
    ("torch.distributed.pipelining._backward", "stage_backward",
     ("stage_output", "output_grads", "input_values")),
    ("torch.distributed.fsdp", "FSDPModule.set_is_last_backward", ("is_last_backward",)),
    ("torch.distributed.fsdp", "FSDPModule.set_reshard_after_backward", ("reshard_after_backward",)),
    ("torch.distributed.fsdp", "FSDPModule.set_requires_all_reduce", ("requires_all_reduce",)),
    ("torch.distributed.fsdp", "FSDPModule.set_requires_gradient_sync", ("requires_gradient_sync",)),
    ("torch.distributed.fsdp", "FSDPModule.set_gradient_divide_factor", ("factor",)),
    ("torch.distributed.fsdp", "FSDPModule.set_force_sum_reduction_for_comms", ("enable",)),
    ("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", ()),
    ("torch.distributed.fsdp", "FSDPModule.reshard", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "_get_module_fsdp_state", ("module",)),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.reset_sharded_param", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.lazy_init", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.unshard", ("async_op",)),
    ("torch.distributed._composable.contract", "STATE_KEY", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.pre_forward", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "RegisterPostBackwardFunction", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.pre_backward", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.post_backward", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.use_training_state", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.wait_for_unshard", ()),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup._to_sharded", ()),
    ("torch.distributed.fsdp", "FSDPModule.unshard", ("async_op",)),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup._prefetch_unshard",
     ("pass_type",)),
    ("torch.distributed.fsdp._fully_shard._fsdp_common", "TrainingState.FORWARD", ()),
    ("torch.distributed.fsdp", "fully_shard",
     ("mesh", "reshard_after_forward", "ignored_params", "mp_policy")),
    ("torch.distributed", "Work.wait", ()),
    ("torch.distributed.distributed_c10d", "default_pg_timeout", ()),
    ("torch.distributed.distributed_c10d", "default_pg_nccl_timeout", ()),
    ("torch.distributed.pipelining", "PipelineStage.perform_reduce_grad", ()),
    ("torch.utils._python_dispatch", "TorchDispatchMode", ()),
    ("torch.utils._python_dispatch", "_disable_current_modes", ()),
    ("torch.utils.flop_counter", "flop_registry", ()),
    ("torch", "_C._current_graph_task_id", ()),
    ("torch", "_C._are_functorch_transforms_active", ()),
    ("torch", "_C._get_tracing_state", ()),
    ("torch", "_C._is_any_autocast_enabled", ()),
    ("torch", "_C._autograd._top_saved_tensors_default_hooks", ()),
    ("torch.autograd.forward_ad", "_current_level", ()),
    ("torch._compile", "_disable_dynamo", ("fn",)),
    ("torch._decomp", "global_decomposition_table", ()),
    ("torch.multiprocessing.reductions", "StorageWeakRef", ("storage",)),
    ("torch.nn.init", "_no_grad_trunc_normal_", ("tensor",)),
)  # fmt: skip
"""A module, a name in it, and the arguments that we pass or override by name."""

COMPILING: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("torch._dynamo", "list_backends", ("exclude_tags",)),
    ("torch._dynamo.callback", "callback_handler.register_start_callback", ()),
    ("torch._dynamo.callback", "callback_handler.register_end_callback", ()),
    ("torch._dynamo.callback", "CallbackArgs", ("callback_trigger", "compile_id")),
    ("torch._dynamo.callback", "CallbackTrigger.DYNAMO", ()),
    ("torch._dynamo.config", "recompile_limit", ()),
    ("torch._dynamo.config", "accumulated_recompile_limit", ()),
    ("torch._dynamo.config", "skip_fwd_side_effects_in_bwd_under_checkpoint", ()),
    ("torch._dynamo.exc", "FailOnRecompileLimitHit", ()),
    ("torch._dynamo.exc", "TorchDynamoException", ()),
    ("torch._inductor.config", "fallback_random", ()),
    ("torch._inductor.runtime.cache_dir_utils", "default_cache_dir", ()),
    ("torch.distributed.distributed_c10d", SET_TIMEOUT, ("timeout", "group")),
    ("torch.distributed.distributed_c10d", "_rank_not_in_group", ("group",)),
    ("torch.distributed.distributed_c10d", "_world.pg_map", ()),
)  # fmt: skip
"""The same for ``train.compile``; importing these takes seconds."""


def verify(parts: tuple[tuple[str, str, tuple[str, ...]], ...] = PARTS) -> None:
    """Raises ``RequestError`` with all missing parts, the installed torch and the supported versions.

    Takes milliseconds.
    """
    missing = [text for module, name, arguments in parts for text in _missing(module, name, arguments)]
    if missing:
        text = f"this version cannot use torch {torch.__version__}: {'; '.join(missing)}"
        raise RequestError((Problem("", text, f"pip install 'torch{SUPPORTED}'"),))


def _missing(module: str, name: str, arguments: tuple[str, ...]) -> list[str]:
    try:
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return [f"{module}.{name} does not exist"]
    known = inspect.signature(target).parameters if arguments else {}
    return [f"{module}.{name} has no argument {a!r}" for a in arguments if a not in known]
