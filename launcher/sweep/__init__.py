"""A grid of runs, one process a cell: a cell that fails is recorded, the others go on."""

from launcher.sweep.run_sweep import check, sweep

__all__ = ["check", "sweep"]
