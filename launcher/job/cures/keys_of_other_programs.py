"""Settings and flags of other programs, and their counterparts here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

FOREIGN_NAMES = {
    "recipe": ("experiment",),  # a group of many projects on Hydra
    "optim.lr": ("learning_rate", "lr_rate", "base_lr", "max_lr"),
    "optim.weight_decay": ("wd", "decay", "l2"),
    "optim.eps": ("adam_epsilon", "adam_eps", "epsilon"),
    "loss.label_smoothing": ("label_smoothing_factor",),
    "train.steps": (
        "max_steps", "num_steps", "total_steps", "iters", "iterations", "max_iters", "train_steps", "nsteps",
        "train_iters",
    ),
    "train.compile": ("torch_compile", "compile.enable", "compile.enabled", "use_compile"),
    "train.compile.backend": ("torch_compile_backend", "compile.backend"),
    "train.compile.mode": ("torch_compile_mode", "compile.mode"),
    "train.ema.decay": ("ema.beta", "ema_decay"),
    "train.early_stop.metric": ("early_stop.monitor", "early_stopping.monitor"),
    "train.early_stop.patience": ("early_stopping_patience",),
    "train.early_stop.min_delta": ("early_stopping_threshold",),
    "train.eval_batches": ("eval_iters", "limit_val_batches", "limit_eval_batches", "validation.steps"),
    "train.epochs": ("num_epochs", "max_epochs", "num_train_epochs", "n_epochs"),
    "train.batch_size": ("bs", "batch", "global_batch_size", "train_batch_size", "batchsize"),
    "train.clip_norm": (
        "grad_clip", "max_grad_norm", "gradient_clip_val", "clip", "clip_grad", "clip_grad_norm",
        "gradient_clipping", "training.max_norm",
    ),
    "train.precision": ("dtype", "amp", "mixed_precision", "mixed_precision_param"),
    "train.eval_every": ("eval_interval", "eval_steps", "val_every", "val_check_interval", "validation.freq"),
    "train.log_every": ("log_interval", "log_freq", "logging_steps", "print_every", "log_every_n_steps",
        "logger.interval",
        "steps_per_print"),
    "schedule.warmup_steps": (
        "warmup", "num_warmup_steps", "warmup_iters", "lr_warmup_iters", "lr_warmup_steps",
    ),
    "schedule.period_steps": ("t_0", "T_0", "first_cycle_steps"),
    "schedule.period_multiplier": ("t_mult", "T_mult", "cycle_mult"),
    "schedule.decay_share": ("decay_ratio",),
    "schedule.decay_shape": ("decay_type",),
    "schedule.final": ("min_lr_factor", "min_lr_ratio", "min_lr_rate"),
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
    "parallel.hsdp.shard_size": (
        "dp_shard", "dp_shard_size", "fsdp_size", "data_parallel_shard_degree", "hsdp.size",
        "optimizer_weight_shard_size",
    ),
    "parallel.hsdp.threshold": ("parallel_optimizer_threshold",),
    "parallel.comm_fusion.openstate": ("comm_fusion.enable", "comm_fusion.enabled"),
    "parallel.comm_fusion.allreduce": ("bucket_cap_mb", "ddp_bucket_cap_mb", "all_reduce_fusion_config"),
    "parallel.fp32_communication": ("force_fp32_communication",),
    "parallel.recompute.policy": ("recompute.mode", "recompute.granularity"),
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
        "num_processes", "num_gpus_per_node", "launch.gpus_per_node",
    ),
    "launch.nnodes": ("nodes", "num_nodes", "num_machines"),
    "launch.timeout_s": ("timeout", "init_timeout_seconds", "ddp_timeout"),
    "launch.port": ("master_port", "main_process_port", "rdzv_port"),
    "launch.device": ("accelerator", "device_target"),
    "launch.backend": ("distributed_backend",),
    "data.seq_len": (
        "seq_length", "sequence_length", "block_size", "context_length", "max_seq_len", "max_length",
        "seqlen", "sequence_len",
    ),
    "model.dim": ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim"),
    "model.layers": ("num_layers", "n_layer", "n_layers", "num_hidden_layers", "depth"),
    "model.heads": ("num_heads", "n_head", "n_heads", "num_attention_heads"),
    "data.val_fraction": (
        "val_split", "validation_split", "test_size", "val_ratio", "validation_fraction", "val_size",
    ),
    "data.path": ("train_data_path", "data_files", "train_file", "dataset_path"),
    "data.tokenizer_file": ("tokenizer_path",),
    "model.kv_heads": ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "num_query_groups"),
    "model.tied": (
        "tie_word_embeddings", "tie_embeddings", "tied_embeddings", "weight_tying", "tie_weights",
        "share_embeddings_and_output_weights",
    ),
    "model.norm_eps": ("layernorm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon"),
    "model.lora.rank": ("lora.r", "lora_r", "lora_rank", "lora.dim"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.modules": ("target_modules", "lora_target_modules"),
    "model.ffn_dim": ("ffn_hidden_size", "intermediate_size", "d_ff"),
    "model.rope_theta": ("rotary_base", "rope_base"),
    "checkpoint.every": (
        "save_every", "save_steps", "save_interval", "checkpoint_every", "ckpt_every", "checkpoint.interval",
        "every_n_train_steps", "save_freq", "checkpointing_steps", "save_checkpoint_steps",
        "checkpoint_interval",
    ),
    "checkpoint.async": ("asynchronous", "async_save", "async_mode"),
    "checkpoint.keep": (
        "save_total_limit", "keep_last", "max_to_keep", "keep_latest_k", "max_keep", "keep_checkpoint_max",
        "keep_last_n", "keep_last_k",
    ),
    "checkpoint.best": ("metric_for_best_model", "checkpoint.monitor"),
    "checkpoint.best_goal": ("checkpoint.mode",),
    "checkpoint.resume": ("resume_from", "resume_from_checkpoint", "resume", "ckpt_path"),
    "run_dir": ("output_dir", "out_dir", "save_dir", "logdir", "log_dir", "workdir", "dump_folder"),
    "runs": ("default_root_dir",),
    "logger.mlflow.experiment": ("mlflow.experiment_name",),
    "logger.wandb.project": ("wandb_project",),
    "logger.wandb.entity": ("wandb_entity",),
    "logger.progress": ("enable_progress_bar", "progress_bar", "tqdm"),
    "name": ("run_name", "exp_name", "experiment_name", "job_name"),
    "debug.anomaly": ("detect_anomaly",),
    "debug.profiler": ("enable_profiling",),
    "seed": (
        "random_seed", "manual_seed", "seed_everything", "training.seed", "train.seed", "trainer.seed",
    ),
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


_OWN = "write your own class: {0}={{_target_: package.module.Class}} with security.allow=[package]"


def own_class(group: str) -> str:
    """Returns the advice for an option that the launcher lacks: a class of the user's can replace it."""
    return f"not supported; {_OWN.format(group)}"


_CLIP = "not supported; train.clip_norm bounds the 2-norm of all gradients together"


_KERNEL = "there is no such switch; the launcher chooses the kernel of the optimizer"


_LENGTH = "not supported; train.steps or train.epochs says how long to train"


_DDP = "there is no such switch; the plan finds parameters without a gradient and fuses gradients"


_HALF = "parallel.fp32_communication=true reduces gradients in fp32; other dtypes are not supported"


_LIKE_LLAMA = "not supported; model=lm is a decoder like Llama (RMSNorm, rotary positions, SwiGLU, no biases)"


_NO_EXPERTS = "the shipped models have no experts; model=hf builds models of transformers that have them"


_END = "a schedule ends at the last optimizer step, train.steps"


_SCOPED = "not supported; temperature and tokens are the settings of a sample"


_READ = "there is no such switch; the ranks read samples themselves, shuffled by seed, the same on any layout"


_OUTER = "torchrun or srun sets it; launch.mode=external joins the ranks that it has started"


_MOMENTS = "train.eval_every and checkpoint.every are the optimizer steps between validations and checkpoints"


_TRACE = "debug=profiler records the time of each operator, debug.profiler.memory=true its memory"


_BEST = "checkpoint.best=METRIC also keeps the best checkpoint, checkpoint.best_goal is min or max"


_VIRTUAL = "parallel.pipeline.interleave=true makes parallel.pipeline.chunks stages per rank"


UNSUPPORTED = {
    "amsgrad": "not supported; optim=adamw is AdamW without it",
    **dict.fromkeys(("maximize", "dampening", "capturable", "decoupled_weight_decay"), own_class("optim")),
    **dict.fromkeys(
        ("fused", "foreach", "optimizer.implementation", "gradient_accumulation_fusion"), _KERNEL
    ),
    **dict.fromkeys(
        ("no_decay", "param_groups", "layerwise_decay", "layer_wise_lr_decay", "no_decay_params"),
        "optim.groups={'*.bias': {weight_decay: 0}} sets what differs, by names of parameters",
    ),
    "early_step_in_backward": "not supported; the optimizer steps after the backward",
    **dict.fromkeys(("clip_grad_value", "clip_value", "clip_norm_type", "gradient_clip_algorithm"), _CLIP),
    **dict.fromkeys(("max_time", "max_tokens", "train.tokens", "training.tokens"), _LENGTH),
    **dict.fromkeys(
        ("exit_interval", "limit_train_batches"), "debug.limit ends a training after so many steps"
    ),
    **dict.fromkeys(("swa", "stochastic_weight_avg"), "not supported; train.ema={} keeps a moving average"),
    **dict.fromkeys(("neftune_noise_alpha", "grad_noise", "gradient_noise"), "noise is not supported"),
    "tf32": "there is no such switch; train.precision is fp32, fp64, bf16 or fp16",
    "auto_find_batch_size": "not supported; set train.batch_size, the samples of all ranks",
    "rampup_batch_size": "not supported; train.batch_size is the same in each step",
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size"), "validations use train.batch_size"),
    **dict.fromkeys(
        (
            "find_unused_parameters",
            "ddp_find_unused_parameters",
            "static_graph",
            "gradient_as_bucket_view",
        ),
        _DDP,
    ),
    **dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size"),
        "parallel.comm_fusion.allreduce and allgather set sizes in MB, as in {mode: size, config: 32}",
    ),
    "comm_fusion.mode": "allreduce, allgather and reducescatter have a mode each",
    "overlap_comm": _OVERLAP,
    **dict.fromkeys(
        ("async_tp", "enable_async_tensor_parallel", "tp_comm_overlap"),
        "overlap of tensor parallelism is not supported",
    ),
    **dict.fromkeys(("loss_parallel", "disable_loss_parallel"), "parallel.operators says what tp cuts"),
    "partition_activations": "not supported; operators=sequence cuts activations over tp",
    "initial_scale_power": "train.loss_scale is the first scale itself; null starts at 65536",
    "vocab_emb_dp": "parallel.operators says what tp cuts",
    **dict.fromkeys(("ulysses", "ring_attention", "ulysses_degree", "sequence_parallel_size"), _CONTEXT),
    **dict.fromkeys(
        ("reshard_after_forward", "fsdp_reshard_after_forward"),
        "parallel.hsdp.optimizer_level=level3 drops the weights after a forward, level2 keeps them",
    ),
    **dict.fromkeys(("mixed_precision_reduce", "communication_data_type", "grad_accum_dtype"), _HALF),
    "gradient_predivide_factor": "not supported; parallel.gradients_mean is mean (true) or sum (false)",
    **dict.fromkeys(("virtual_stages", "vpp", "vpp_size", "pp_interleave_num"), _VIRTUAL),
    "virtual_pipeline_model_parallel_size": _VIRTUAL,
    **dict.fromkeys(
        ("split_points", "pipeline.balance", "module_fqns_per_model_part", "pipeline_parallel_split_points"),
        "parallel.pipeline.stage_config={module: stage} says the stage of each module",
    ),
    "ddp": f"it is the default: each data-parallel rank has a copy; {_HSDP}",
    **dict.fromkeys(("fsdp_config", "fsdp_plugin"), _HSDP),
    **dict.fromkeys(("sync_bn", "sync_batchnorm"), "not supported; torch.nn.SyncBatchNorm is refused, too"),
    **dict.fromkeys(("global_rank", "local_rank", "node_rank", "machine_rank", "master_addr"), _OUTER),
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "main_process_ip"), _OUTER),
    **dict.fromkeys(
        ("visible_devices", "cuda_visible_devices", "gpu_ids"),
        "the environment variable CUDA_VISIBLE_DEVICES says which GPUs a run may use",
    ),
    **dict.fromkeys(
        ("distributed_timeout_minutes", "timeout_minutes"), "launch.timeout_s is the timeout in seconds"
    ),
    "slurm.gres": "launch.slurm.gpus_per_node is the number of GPUs; launch.slurm.extra has other options",
    **dict.fromkeys(
        ("enable_alltoall", "gradient_aggregation_group", "micro_batch_interleave_num", "sink_mode"),
        "not supported; there is no such switch",
    ),
    "optimizer_weight_shard_aggregated_save": "checkpoints of any layout can be read in any other",
    **dict.fromkeys(("auto_trans_ckpt", "src_strategy_path_or_dir"), "checkpoints of any layout can be read"),
    **dict.fromkeys(("lr_decay_iters", "lr_decay_steps", "t_max", "total_iters"), _END),
    **dict.fromkeys(("lr_warmup_fraction",), "schedule.warmup_steps counts optimizer steps"),
    **dict.fromkeys(("gamma", "step_size", "milestones", "num_cycles"), "no schedule of the launcher has it"),
    **dict.fromkeys(("top_p", "top_k", "do_sample", "repetition_penalty", "num_beams"), _SCOPED),
    "sample.max_length": "it also counts the prompt; steps.sample.tokens counts what is generated",
    **dict.fromkeys(
        ("dataloader_num_workers", "prefetch_factor"), "samples are read by the ranks themselves"
    ),
    **dict.fromkeys(("shuffle", "drop_last", "dataloader_drop_last", "group_by_length", "streaming"), _READ),
    "data_seed": "every random stream derives from seed",
    **dict.fromkeys(
        ("text_column", "dataset_text_field"), "the step prepare reads a column: steps.prepare.field=NAME"
    ),
    **dict.fromkeys(
        ("max_samples", "max_train_samples"), "not supported; debug.overfit repeats so many samples"
    ),
    **dict.fromkeys(
        ("mixture", "data.weights", "blend", "data_blend"),
        "data=tokens mixes: data.sources=[{path: FILES, weight: 2}]",
    ),
    **dict.fromkeys(
        ("data.augment", "augmentation"),
        "data=images has data.crop, data.flip, data.resize and data.normalise",
    ),
    **dict.fromkeys(
        ("evaluate.split", "dataset_split", "data.split"), "a fraction is held out: data.val_fraction"
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions"), "data.seq_len is the length; a model has no other limit"
    ),
    **dict.fromkeys(
        ("swiglu", "activation", "normalization", "position_embedding_type", "model.bias", "add_bias_linear"),
        _LIKE_LLAMA,
    ),
    "head_dim": "it is model.dim divided by model.heads",
    **dict.fromkeys(
        ("init_method_std", "initializer_range", "model.init"), "not supported: initialization is fixed"
    ),
    **dict.fromkeys(("num_experts", "moe_router_topk", "expert_num", "model.moe", "n_experts"), _NO_EXPERTS),
    **dict.fromkeys(
        ("freeze", "freeze_layers"),
        "not supported, except by model.lora; a class of yours can freeze its weights",
    ),
    **dict.fromkeys(
        ("pretrained", "from_pretrained", "model_name_or_path"),
        "model=hf model.path=FOLDER builds the model of a folder, with its weights",
    ),
    **dict.fromkeys(("attention_backend", "model.attn"), "torch chooses the kernel of attention"),
    **dict.fromkeys(("model.converters", "fp8_format", "float8"), "quantized training is not supported"),
    **dict.fromkeys(
        ("checkpoint.enable", "enable_checkpoint", "enable_checkpointing", "save_last", "checkpoint.folder"),
        _SAVE,
    ),
    **dict.fromkeys(("logging_dir", "tensorboard_dir"), "logger=tensorboard writes to the folder of the run"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"), _MOMENTS),
    **dict.fromkeys(("check_val_every_n_epoch", "validation.enable", "eval_epochs"), _MOMENTS),
    **dict.fromkeys(("save_best", "save_top_k", "greater_is_better", "load_best_model_at_end"), _BEST),
    **dict.fromkeys(
        ("save_optimizer", "save_only_model", "last_save_model_only", "no_save_optim"),
        "a checkpoint has all that a resumed run needs; the step export writes weights alone",
    ),
    **dict.fromkeys(("initial_load_path", "no_load_optim"), _LOAD),
    "checkpoint.sharded": "each rank writes its shards; the step export writes full tensors",
    "checkpoint.compression": "not supported; tensors are written as they are",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "steps=[train,evaluate] says what is done"),
    "overwrite_output_dir": "run_dir resumes the run in a folder; without it each run has a new folder",
    "push_to_hub": "not supported; the step export writes a folder that you can upload",
    **dict.fromkeys(("num_sanity_val_steps", "remove_unused_columns"), "not supported, and not needed"),
    "trainer.benchmark": "not supported; deterministic=false lets torch choose its kernels",
    **dict.fromkeys(
        (
            "profiling.enable_memory_snapshot",
            "memory_snapshot",
            "wall_clock_breakdown",
            "flops_profiler",
            "flops_profiler.enabled",
        ),
        _TRACE,
    ),
    **dict.fromkeys(("debug.nan", "detect_nan"), "debug.anomaly=true names the operator that makes a NaN"),
    "log_throughput": "metrics.jsonl always has the throughput",
    **dict.fromkeys(
        ("logger.level", "logger.verbose", "log_level", "verbosity"),
        "there is no level; logger.progress is auto, bar, plain or off",
    ),
    "gc_freq": "the launcher collects garbage between optimizer steps itself",
    "fault_tolerance.enable": "launch.max_restarts is how often a failed run starts again",
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
    **dict.fromkeys(
        (
            "offload",
            "cpu_offload",
            "offload_optimizer",
            "offload_params",
            "offload_param",
            "offload_optimizer.device",
            "offload_param.device",
            "cpu_checkpointing",
            "activation_cpu_offload",
        ),
        _OFFLOAD,
    ),
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
        "there is no such switch; operators=sequence cuts sequences over tp, parallel.operators says what",
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
            "recompute_num_layers",
        ),
        _RECOMPUTE,
    ),
    **dict.fromkeys(("lr_schedule", "lr_scheduler.decay_type"), _SCHEDULE),
    **dict.fromkeys(("training.batch_size", "runner_config.batch_size"), _OF_ONE_RANK),
    **dict.fromkeys(
        ("beta1", "beta2", "adam_beta1", "adam_beta2"), "optim.betas has both, as in optim.betas=[0.9,0.95]"
    ),
    **dict.fromkeys(("tokenizer_model", "tokenizer_type"), _TOKENIZER),
    **dict.fromkeys(("load", "load_checkpoint"), _LOAD),
    "dataset": "data=NAME chooses how samples are read, data.path or data.root the files",
    **dict.fromkeys(
        ("enable_wandb", "enable_tensorboard"),
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
    **dict.fromkeys(
        ("micro_batch_size", "pipeline_parallel_microbatch_size"),
        "it follows from train.batch_size and parallel.pipeline.micro_batch_num",
    ),
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
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches", "train.accumulate"), _MICRO
    ),
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
}
"""Settings of other programs that do not exist here: the reason, and what to set instead.

A name that is ambiguous alone includes its section.
"""


GROUPS = {
    "optim": ("optim.type", "optimizer.type", "optimizer"),
    "schedule": (
        "schedule.type", "scheduler.type", "lr_scheduler_type", "lr_decay_style", "lr_scheduler",
        "optim.scheduler",
    ),
    "loss": ("criterion", "loss_fn", "loss.type"),
    "logger": ("report_to",),
}  # fmt: skip
"""Keys by which other programs choose an option of a group."""


def group(name: str) -> str:
    """Returns the group of which the key ``name`` chooses an option in other programs.

    Returns "" for any other key.
    """
    parts = name.lower().replace("-", "_").split(".")
    return next((g for g, names in GROUPS.items() if {".".join(parts[-2:]), parts[-1]} & {*names}), "")


UNSUPPORTED |= {
    name: f"{chosen}=NAME chooses it; python -m launcher --help {chosen} lists the options"
    for chosen, names in GROUPS.items()
    for name in names
}


_MODES = "semi_auto is the mode; parallel.pipeline, hsdp and grid say how ranks share the work"


_NEEDS_SIZE = "should be keys, as in {optimizer_level: level3, shard_size: N}: N ranks share one copy"


_OF_RUN = "not the path of a checkpoint; auto resumes the newest checkpoint of run_dir"


_FORMAT = "not supported; should be one of safetensors; the step import reads what other programs wrote"


_INTERLEAVED = "it is 1f1b with interleave"


_KEY = "parallel.pipeline"
VALUES = {
    **{
        ("parallel.mode", mode): (f"not supported; {_MODES}", "")
        for mode in ("data_parallel", "hybrid_parallel", "stand_alone")
    },
    **{
        ("parallel.mode", mode): ("not supported; sharding_propagation and recursive_programming search", "")
        for mode in ("auto_parallel", "dynamic_programming")
    },
    **{
        ("parallel.hsdp", word): (_NEEDS_SIZE, "") for word in ("hybrid_shard", "hybrid", "hybrid_full_shard")
    },
    **{
        (f"{_KEY}.scheduler", name): (_INTERLEAVED, f"{_KEY}.scheduler=1f1b {_KEY}.interleave=true")
        for name in ("interleaved", "interleaved_1f1b", "interleaved1f1b")
    },
    **{
        (f"{_KEY}.scheduler", name): ("not supported; 1f1b and gpipe can be interleaved", "")
        for name in ("loopedbfs", "looped_bfs", "dfs", "bfs")
    },
    **{("checkpoint.resume", word): (_OF_RUN, "") for word in ("True", "true")},
    **{
        ("checkpoint.resume", word): ("the value for this is never", "checkpoint.resume=never")
        for word in ("False", "false")
    },
    **{
        ("checkpoint.format", name): (_FORMAT, "")
        for name in ("dcp", "torch_dist", "pt", "pth", "bin", "zarr", "hdf5", "ckpt", "torch", "pickle")
    },
    **{
        ("steps.export.format", name): ("not supported; should be safetensors or hf", "")
        for name in ("gguf", "onnx", "torchscript", "pt", "pth", "ckpt", "mindir")
    },
    **{
        ("train.precision", name): ("not supported; should be one of fp32, fp64, bf16, fp16", "")
        for name in ("fp8", "int8", "int4", "nf4", "fp4", "mxfp8", "float8")
    },
    **{
        ("checkpoint.async", word): ("the value for this is true", "checkpoint.async=true")
        for word in ("async", "thread", "threads", "async_with_pinned_mem")
    },
    ("train.batch_size", "auto"): ("not supported; set the number of samples of all ranks", ""),
}
"""Values of other programs at our keys: the explanation, and the overrides that mean the same."""


def of_value(key: str, value: object) -> tuple[str, str] | None:
    """Returns the explanation and the cure of ``VALUES``; ``None`` for any other value."""
    if isinstance(value, str | bool):
        return VALUES.get((key, str(value))) or VALUES.get((key, str(value).lower()))
    return None


OF_STEPS = {"dst": ("out", "output", "output_dir", "out_dir", "dest", "destination", "to", "target"),
         "src": ("in", "input", "input_dir", "inputs", "source", "from", "files", "text"),
         "tokens": ("max_new_tokens", "max_tokens", "num_tokens", "n_tokens", "tokens_to_generate"),
         "batches": ("max_batches", "num_batches", "limit_val_batches", "eval_iters"),
         "max_shard_size": ("shard_size",)}  # fmt: skip
"""Settings of steps, of files that they read and write above all, and their names in other programs."""


def step_setting(name: str, fields: Collection[str]) -> str:
    """Returns the field of a step that ``name`` means, here or in other programs.

    Returns "" if ``fields`` has none.
    """
    if name in fields:
        return name
    return next((field for field, names in OF_STEPS.items() if field in fields and name in names), "")


SWITCHES = {half: f"train.precision={half}" for half in ("bf16", "fp16")}
"""Switches of other programs, and the override that each means here."""


def our_key(parts: Sequence[str], valid: Collection[str]) -> str | None:
    """Returns our key for a setting that other programs call ``parts``; ``None`` if ``valid`` has none."""
    known = {parts[-1].lower().replace("-", "_"), ".".join(parts[-2:]).lower()}
    return next((k for k, names in FOREIGN_NAMES.items() if known & set(names) and k in valid), None)


def translated(name: str, value: object) -> object:
    """Returns the value here of another program's setting ``name``.

    For example, PEFT names modules by the ends of their names.
    """
    if name not in ("target_modules", "lora_target_modules"):
        return value
    if isinstance(value, list):
        return [translated(name, item) for item in value]
    if value == "all-linear":
        return "*"
    return f"*.{value}" if isinstance(value, str) and value.isidentifier() else value


def switch(parts: Sequence[str], value: object) -> str:
    """Returns the override that another program's switch means when it is on.

    Returns "" if ``parts`` is no such switch.
    """
    names = [part.lower() for part in parts]
    name = names[-2] if names[-1] == "enabled" and len(names) > 1 else names[-1]
    return SWITCHES.get(name, "") if value is True else ""


def why_not(name: str) -> str:
    """Returns why a setting of other programs does not exist here; "" for any other name.

    Args:
        name: the key, or a flag.
    """
    parts = name.lstrip("-").lower().replace("-", "_").split(".")
    names = (".".join(parts[-2:]), parts[-1], parts[0])  # the last one is a section of another program
    return next((UNSUPPORTED[name] for name in names if name in UNSUPPORTED), "")
