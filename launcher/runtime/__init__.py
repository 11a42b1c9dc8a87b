"""Processes and time: start ranks, run the schedule, loop over steps, log, fail well.

It carries the plan out; a choice made here is a bug. It knows no Hydra.
"""

__all__ = [
    "code_versions",
    "console_log",
    "device",
    "faults",
    "free_memory",
    "gc_thresholds",
    "git",
    "log",
    "run_folder",
    "signals",
    "stdio",
]
