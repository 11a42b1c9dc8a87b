"""Maps names of settings in other programs to ours, and explains those that do not exist here."""

from __future__ import annotations

OTHERS = {
    "recipe": ("experiment",),  # a group of many projects on Hydra
    "optim.lr": ("learning_rate", "lr_rate", "base_lr", "max_lr"),
    "optim.weight_decay": ("wd", "decay", "l2"),
    "train.steps": (
        "max_steps", "num_steps", "total_steps", "iters", "iterations", "max_iters", "train_steps", "nsteps",
    ),
    "train.epochs": ("num_epochs", "max_epochs", "num_train_epochs", "n_epochs"),
    "train.batch_size": ("bs", "batch", "global_batch_size", "train_batch_size", "batchsize"),
    "train.clip_norm": (
        "grad_clip", "max_grad_norm", "gradient_clip_val", "clip", "clip_grad", "clip_grad_norm",
    ),
    "train.precision": ("dtype", "amp", "mixed_precision"),
    "train.eval_every": ("eval_interval", "eval_steps", "val_every", "val_check_interval"),
    "train.log_every": ("log_interval", "logging_steps", "print_every", "log_every_n_steps"),
    "schedule.warmup_steps": ("warmup", "num_warmup_steps", "warmup_iters"),
    "schedule.period_steps": ("t_0", "T_0", "first_cycle_steps"),
    "schedule.period_multiplier": ("t_mult", "T_mult", "cycle_mult"),
    "schedule.decay_share": ("decay_ratio",),
    "schedule.decay_shape": ("decay_type",),
    "parallel.pipeline.stages": (
        "pp", "num_stages", "pipeline_stages", "pipeline_parallel_size", "pp_size", "pipeline_parallel",
    ),
    "parallel.pipeline.micro_batch_num": (
        "micro_batches", "num_microbatches", "n_microbatches", "num_micro_batches",
    ),
    "parallel.grid.tp": ("tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "parallel.hsdp.optimizer_level": ("zero_stage", "zero", "sharding_level"),
    # methods of MindSpore's AutoParallel, and arguments of its older set_auto_parallel_context
    "parallel.mode": ("parallel_mode",),
    "parallel.group_file": ("set_group_ckpt_save_file", "group_ckpt_save_file"),
    "parallel.param_strategy.save": ("save_param_strategy_file", "strategy_ckpt_save_file"),
    "parallel.param_strategy.load": ("load_param_strategy_file", "strategy_ckpt_load_file"),
    "parallel.param_strategy.only_trainable": ("disable_strategy_file_only_for_trainable_params",),
    "parallel.operator_strategy.save": ("save_operator_strategy_file",),
    "parallel.operator_strategy.load": ("load_operator_strategy_file",),
    "parallel.local_norm.print": ("print_local_norm",),
    "parallel.local_norm.dump": ("dump_local_norm", "dump_local_norm_path"),
    "parallel.local_norm.device": ("enable_device_local_norm", "dump_device_local_norm"),
    "parallel.deferred_init": ("no_init_parameters",),
    "launch.nproc": (
        "gpus", "devices", "device_num", "nproc_per_node", "num_gpus", "n_gpus", "world_size", "ngpus",
        "num_processes",
    ),
    "launch.nnodes": ("nodes", "num_nodes", "num_machines"),
    "launch.timeout_s": ("timeout",),
    "data.seq_len": (
        "seq_length", "sequence_length", "block_size", "context_length", "max_seq_len", "max_length",
        "seqlen",
    ),
    "model.dim": ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim"),
    "model.layers": ("num_layers", "n_layer", "n_layers", "num_hidden_layers", "depth"),
    "model.heads": ("num_heads", "n_head", "n_heads", "num_attention_heads"),
    "model.kv_heads": ("num_kv_heads", "num_key_value_heads", "n_kv_heads"),
    "checkpoint.every": ("save_every", "save_steps", "save_interval", "checkpoint_every", "ckpt_every"),
    "checkpoint.async": ("asynchronous", "async_save"),
    "checkpoint.keep": ("save_total_limit", "keep_last", "max_to_keep", "save_top_k"),
    "checkpoint.resume": ("resume_from", "resume_from_checkpoint", "resume"),
    "run_dir": ("output_dir", "out_dir", "save_dir", "logdir", "log_dir", "workdir"),
    "seed": ("random_seed", "manual_seed"),
    "deterministic": ("determinism", "use_deterministic_algorithms"),
}  # fmt: skip
"""Our keys, and their names in other programs."""

NOT_NEGATED = ("no_init_parameters",)
"""Names that begin like a negation but mean the same as ours."""

_MICRO = "parallel.pipeline.micro_batch_num cuts train.batch_size into micro batches"
_DATA_PARALLEL = "data-parallel ranks are those that stages and tp leave over of launch.nproc"

_CONTEXT = "context parallelism is not supported"
_EXPERTS = "expert parallelism is not supported; every rank of a stage has all experts"
_OFFLOAD = "offloading to the memory of the host is not supported"
_QUANTISED = "quantised weights are not supported"

UNLIKE = {
    **dict.fromkeys(("cp", "cp_size", "context_parallel", "context_parallel_size"), _CONTEXT),
    **dict.fromkeys(("ep", "ep_size", "expert_parallel", "expert_parallel_size"), _EXPERTS),
    **dict.fromkeys(("offload", "cpu_offload", "offload_optimizer", "offload_params"), _OFFLOAD),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantize", "quantization_config"), _QUANTISED
    ),
    "fp8": "fp8 is not supported; train.precision is fp32, fp64, bf16 or fp16",
    **dict.fromkeys(
        ("no_init_parameters_in_compile", "init_parameters_in_compile"),
        "no parameter is made in a compilation; parallel.deferred_init makes them on their ranks",
    ),
    "full_batch": "write parallel.dataset_strategy=full_batch",
    "enable_parallel_optimizer": "parallel.hsdp={} shards weights and optimizer state",
    **dict.fromkeys(
        ("sequence_parallel", "sp"), "there is no such switch; parallel.operators says what tp cuts"
    ),
    **dict.fromkeys(("bf16", "fp16"), "write train.precision=bf16 or fp16"),
    **dict.fromkeys(
        ("min_lr", "eta_min", "lr_min"), "schedule.final is the share of optim.lr that is left at the end"
    ),
    "pin_memory": "samples are read by the ranks themselves",
    "micro_batch_size": "it follows from train.batch_size and parallel.pipeline.micro_batch_num",
    "per_device_train_batch_size": "train.batch_size counts the samples of all ranks",
    "per_device_batch_size": "train.batch_size counts the samples of all ranks",
    "gradient_accumulation_steps": _MICRO,
    "grad_accum": _MICRO,
    "dp": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "warmup_ratio": "schedule.warmup_steps counts optimizer steps",
    "num_workers": "samples are read by the ranks themselves",
    "dropout": "the shipped models have none",
    "momentum": "it is a setting of optim=sgd and of optim=momentum",
}
"""Settings of other programs that do not exist here: the reason, and what to set instead."""
