"""Settings and flags of other programs, and their counterparts here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

FOREIGN_NAMES = {
    "recipe": ("experiment",),  # a group of many projects on Hydra
    "optim.lr": ("learning_rate", "lr_rate", "base_lr", "max_lr"),
    "optim.weight_decay": ("wd", "decay", "l2"),
    "train.steps": (
        "max_steps", "num_steps", "total_steps", "iters", "iterations", "max_iters", "train_steps", "nsteps",
        "train_iters",
    ),
    "train.epochs": ("num_epochs", "max_epochs", "num_train_epochs", "n_epochs"),
    "train.batch_size": ("bs", "batch", "global_batch_size", "train_batch_size", "batchsize"),
    "train.clip_norm": (
        "grad_clip", "max_grad_norm", "gradient_clip_val", "clip", "clip_grad", "clip_grad_norm",
        "gradient_clipping", "training.max_norm",
    ),
    "train.precision": ("dtype", "amp", "mixed_precision", "mixed_precision_param"),
    "train.eval_every": ("eval_interval", "eval_steps", "val_every", "val_check_interval", "validation.freq"),
    "train.log_every": ("log_interval", "log_freq", "logging_steps", "print_every", "log_every_n_steps"),
    "schedule.warmup_steps": (
        "warmup", "num_warmup_steps", "warmup_iters", "lr_warmup_iters", "lr_warmup_steps",
    ),
    "schedule.period_steps": ("t_0", "T_0", "first_cycle_steps"),
    "schedule.period_multiplier": ("t_mult", "T_mult", "cycle_mult"),
    "schedule.decay_share": ("decay_ratio",),
    "schedule.decay_shape": ("decay_type",),
    "schedule.final": ("min_lr_factor",),
    "parallel.pipeline.stages": (
        "pp", "num_stages", "pipeline_stages", "pipeline_parallel_size", "pp_size", "pipeline_parallel",
        "pipeline_model_parallel_size", "pipeline_parallel_degree", "pipeline_stage",
    ),
    "parallel.pipeline.micro_batch_num": (
        "micro_batches", "num_microbatches", "n_microbatches", "num_micro_batches",
    ),
    "parallel.grid.tp": (
        "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size",
        "tensor_parallel_degree", "model_parallel",
    ),
    "parallel.pipeline.scheduler": ("pipeline_parallel_schedule", "pipeline_scheduler", "pipeline_schedule"),
    "parallel.pipeline.interleave": ("pipeline_interleave",),
    "parallel.grid.dp_replicate": ("data_parallel_replicate_degree",),
    "parallel.hsdp.shard_size": ("dp_shard", "dp_shard_size", "fsdp_size", "data_parallel_shard_degree"),
    "parallel.recompute": (
        "gradient_checkpointing", "activation_checkpointing", "activation_checkpoint",
        "checkpoint_activations", "use_recompute",
    ),
    "parallel.hsdp.optimizer_level": ("zero_stage", "zero", "sharding_level", "zero_optimization.stage"),
    # methods of MindSpore's AutoParallel, and arguments of its older set_auto_parallel_context
    "parallel.mode": ("parallel_mode", "search_mode", "auto_parallel_search_mode"),
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
        "gpu", "gpus", "devices", "device_num", "nproc_per_node", "num_gpus", "n_gpus", "world_size", "ngpus",
        "num_processes",
    ),
    "launch.nnodes": ("nodes", "num_nodes", "num_machines"),
    "launch.timeout_s": ("timeout", "init_timeout_seconds"),
    "launch.device": ("accelerator", "device_target"),
    "launch.backend": ("distributed_backend",),
    "data.seq_len": (
        "seq_length", "sequence_length", "block_size", "context_length", "max_seq_len", "max_length",
        "seqlen", "sequence_len",
    ),
    "model.dim": ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim"),
    "model.layers": ("num_layers", "n_layer", "n_layers", "num_hidden_layers", "depth"),
    "model.heads": ("num_heads", "n_head", "n_heads", "num_attention_heads"),
    "model.kv_heads": ("num_kv_heads", "num_key_value_heads", "n_kv_heads"),
    "model.ffn_dim": ("ffn_hidden_size", "intermediate_size", "d_ff"),
    "model.rope_theta": ("rotary_base", "rope_base"),
    "checkpoint.every": (
        "save_every", "save_steps", "save_interval", "checkpoint_every", "ckpt_every", "checkpoint.interval",
    ),
    "checkpoint.async": ("asynchronous", "async_save"),
    "checkpoint.keep": ("save_total_limit", "keep_last", "max_to_keep", "save_top_k", "keep_latest_k"),
    "checkpoint.resume": ("resume_from", "resume_from_checkpoint", "resume", "ckpt_path"),
    "run_dir": ("output_dir", "out_dir", "save_dir", "logdir", "log_dir", "workdir", "dump_folder"),
    "runs": ("default_root_dir",),
    "debug.anomaly": ("detect_anomaly",),
    "debug.profiler": ("enable_profiling",),
    "seed": ("random_seed", "manual_seed", "seed_everything"),
    "deterministic": ("determinism", "use_deterministic_algorithms"),
}  # fmt: skip
"""Our keys, and their names in other programs. A name that is ambiguous alone includes its section."""


NOT_NEGATED = ("no_init_parameters",)
"""Names that begin like a negation but mean the same as ours."""


_MICRO = "parallel.pipeline.micro_batch_num cuts train.batch_size into micro batches"


_OF_ONE_RANK = "it counts the samples of one rank; train.batch_size counts those of all ranks"


_RECOMPUTE = "parallel.recompute={modules: '*'} recomputes; its policy is full or selective"


_HSDP = "parallel.hsdp={} shards weights and optimizer state"


_OVERLAP = "there is no such switch; the plan says what is sent during the computation"


_SCHEDULE = "schedule=NAME chooses cosine, linear, constant, wsd and others"


_TOKENIZER = "data.tokenizer=file data.tokenizer_file=FILE reads a tokenizer.json"


_DATA_PARALLEL = "the number of data-parallel ranks is launch.nproc divided by stages and tp"


_SAVE = "checkpoint.every=STEPS saves while training, steps=[train,save] at its end; run_dir is the folder"


_LOAD = "checkpoint.resume=PATH resumes a training; the step load reads weights from steps.load.path=PATH"


_CONTEXT = "context parallelism is not supported"


_EXPERTS = "expert parallelism is not supported; every rank of a stage has all experts"


_OFFLOAD = "offloading to the memory of the host is not supported"


_QUANTIZED = "quantized weights are not supported"


UNSUPPORTED = {
    **dict.fromkeys(
        ("cp", "cp_size", "context_parallel", "context_parallel_size", "context_parallel_degree"), _CONTEXT
    ),
    **dict.fromkeys(
        (
            "ep",
            "ep_size",
            "expert_parallel",
            "expert_parallel_size",
            "expert_model_parallel_size",
            "expert_parallel_degree",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(("offload", "cpu_offload", "offload_optimizer", "offload_params"), _OFFLOAD),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantize", "quantization_config"), _QUANTIZED
    ),
    "fp8": "fp8 is not supported; train.precision is fp32, fp64, bf16 or fp16",
    **dict.fromkeys(
        ("no_init_parameters_in_compile", "init_parameters_in_compile"),
        "compiling makes no parameters; parallel.deferred_init makes each parameter on its ranks",
    ),
    "full_batch": "write parallel.dataset_strategy=full_batch",
    **dict.fromkeys(("enable_parallel_optimizer", "use_distributed_optimizer", "deepspeed"), _HSDP),
    "parallel_optimizer_config": "its keys are shard_size, threshold and optimizer_level of parallel.hsdp",
    **dict.fromkeys(
        ("distributed_type", "strategy", "fsdp_sharding_strategy", "sharding_strategy"),
        f"{_HSDP}; without it each rank keeps all of them",
    ),
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), _OVERLAP),
    **dict.fromkeys(
        ("sequence_parallel", "sp", "use_seq_parallel"),
        "there is no such switch; parallel.operators says what tp cuts",
    ),
    **dict.fromkeys(("bf16", "fp16", "bf16.enabled", "fp16.enabled"), "write train.precision=bf16 or fp16"),
    "save": _SAVE,
    **dict.fromkeys(
        ("min_lr", "eta_min", "lr_min"), "schedule.final is the share of optim.lr that is left at the end"
    ),
    **dict.fromkeys(
        (
            "activation_checkpoint.mode",
            "selective_ac_option",
            "recompute_granularity",
            "recompute_method",
            "recompute_activations",
            "recompute_config",
            "select_recompute",
        ),
        _RECOMPUTE,
    ),
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_decay_style", "lr_scheduler", "lr_schedule", "lr_scheduler.decay_type"),
        _SCHEDULE,
    ),
    **dict.fromkeys(("training.batch_size", "runner_config.batch_size"), _OF_ONE_RANK),
    **dict.fromkeys(
        ("beta1", "beta2", "adam_beta1", "adam_beta2"), "optim.betas has both, as in optim.betas=[0.9,0.95]"
    ),
    **dict.fromkeys(("tokenizer_model", "tokenizer_type"), _TOKENIZER),
    **dict.fromkeys(("load", "load_checkpoint"), _LOAD),
    "dataset": "data=NAME chooses how samples are read, data.path or data.root the files",
    **dict.fromkeys(
        ("report_to", "enable_wandb", "enable_tensorboard"),
        "logger=NAME chooses wandb, tensorboard and others",
    ),
    "fast_dev_run": "debug.limit is the number of steps after which a training ends",
    "overfit_batches": "debug.overfit is the number of samples that are repeated",
    "untie_embeddings_and_output_weights": "write model.tied=false",
    **dict.fromkeys(("use_flash_attn", "attn_implementation"), "torch chooses the kernel of attention"),
    "num_layers_per_virtual_pipeline_stage": "it follows from parallel.pipeline.interleave and chunks",
    "strategy_ckpt_config": "its keys are save, load and only_trainable of parallel.param_strategy",
    "pipeline_config": "its keys are interleave and scheduler of parallel.pipeline",
    "parallel_config": "its keys are parallel.grid.tp, parallel.pipeline.stages and micro_batch_num",
    "pin_memory": "samples are read by the ranks themselves",
    "micro_batch_size": "it follows from train.batch_size and parallel.pipeline.micro_batch_num",
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_batch_size",
            "local_batch_size",
            "batch_size_per_gpu",
            "batch_size_per_device",
            "batch_size_per_rank",
            "train_micro_batch_size_per_gpu",
            "device_batch_size",
            "local_bs",
        ),
        "train.batch_size counts the samples of all ranks",
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"), _MICRO),
    "dp": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "data_parallel": _DATA_PARALLEL,
    "warmup_fraction": "schedule.warmup_steps counts optimizer steps",
    "warmup_ratio": "schedule.warmup_steps counts optimizer steps",
    "num_workers": "samples are read by the ranks themselves",
    **dict.fromkeys(
        ("dropout", "attention_dropout", "hidden_dropout", "lora_dropout"),
        "the shipped models have no dropout",
    ),
    **dict.fromkeys(
        ("out", "output", "output_path"),
        "each step has its own setting for its output, such as steps.export.path and steps.prepare.dst",
    ),
    "momentum": "it is a setting of optim=sgd and of optim=momentum",
}
"""Settings of other programs that do not exist here: the reason, and what to set instead.

A name that is ambiguous alone includes its section.
"""


FILES = {"dst": ("out", "output", "output_dir", "out_dir", "dest", "destination", "to", "target"),
         "src": ("in", "input", "input_dir", "inputs", "source", "from", "files", "text")}  # fmt: skip
"""The settings of steps for the files that they read and write, and their names in other programs."""


def step_setting(name: str, fields: Collection[str]) -> str:
    """The field of a step that ``name`` means, here or in other programs; "" if ``fields`` has none."""
    if name in fields:
        return name
    return next((field for field, names in FILES.items() if field in fields and name in names), "")


SWITCHES = {half: f"train.precision={half}" for half in ("bf16", "fp16")}
"""Switches of other programs, and the override that each means here."""


def our_key(parts: Sequence[str], valid: Collection[str]) -> str | None:
    """Our key for a setting that other programs call ``parts``; ``None`` if ``valid`` has none."""
    known = {parts[-1].lower().replace("-", "_"), ".".join(parts[-2:]).lower()}
    return next((k for k, names in FOREIGN_NAMES.items() if known & set(names) and k in valid), None)


def switch(parts: Sequence[str], value: object) -> str:
    """The override that another program's switch means when it is on; "" if ``parts`` is no such switch."""
    names = [part.lower() for part in parts]
    name = names[-2] if names[-1] == "enabled" and len(names) > 1 else names[-1]
    return SWITCHES.get(name, "") if value is True else ""


def why_not(name: str) -> str:
    """Why a setting of other programs does not exist here; "" for any other name.

    Args:
        name: the key, or a flag.
    """
    parts = name.lstrip("-").lower().replace("-", "_").split(".")
    return UNSUPPORTED.get(".".join(parts[-2:]), UNSUPPORTED.get(parts[-1], ""))
