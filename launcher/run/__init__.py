"""One request from its plan to its last step: checks before anything starts, the run folder, the phases."""

__all__ = [
    "commands",
    "cures",
    "execute",
    "frozen_request",
    "hand_over",
    "launch",
    "memory_check",
    "run",
    "settle",
    "slurm",
    "slurm_files",
]
