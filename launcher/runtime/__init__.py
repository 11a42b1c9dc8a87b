"""Runs ranks: starts processes, runs the schedule, loops over steps, logs, and reports failures.

It carries out the plan: a choice made here is a bug. It does not use Hydra.
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
