"""One request from its plan to its last step, here or as a job of Slurm: checks, run folder, phases."""

__all__ = [
    "curve",
    "execute",
    "frozen_request",
    "launch",
    "launch_device",
    "memory_check",
    "process_limits",
    "resolved_request",
    "run",
    "slurm",
    "slurm_files",
    "status_logs_cancel",
    "submit_to_cluster",
    "try_cures",
]
