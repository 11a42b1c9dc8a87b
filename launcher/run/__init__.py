"""One request from its plan to its last step, here or as a job of Slurm: checks, run folder, phases."""

__all__ = [
    "commands",
    "cures",
    "curve",
    "execute",
    "frozen_request",
    "launch",
    "memory_check",
    "run",
    "settle",
    "slurm",
    "slurm_files",
    "submit_to_cluster",
]
