"""The loop over steps: batches, the pipeline, the loss scale, metrics, checkpoints."""

__all__ = [
    "averaging",
    "batches",
    "callbacks",
    "changes_between_steps",
    "checkpoint_tensors",
    "compile_timeout",
    "loop",
    "loss_scaling",
    "metrics_file",
    "module_state",
    "monitored_metrics",
    "pipeline",
    "profiler",
    "progress",
    "replicas",
    "save",
    "save_thread",
    "session",
    "throughput",
]
