"""The loop over steps: batches, the pipeline, the loss scale, metrics, checkpoints."""

__all__ = [
    "batches",
    "callbacks",
    "device_figures",
    "ema",
    "first_step",
    "global_streams",
    "grad_norm_log",
    "loop",
    "loss_scaling",
    "metrics",
    "module_state",
    "pipeline",
    "profiler",
    "progress",
    "save",
    "save_thread",
    "session",
    "state",
    "target_values",
    "watched_metrics",
]
