"""Many runs: planned together, run side by side here or by a cluster, ranked; one that fails ends alone."""

from launcher.sweep.run_sweep import check, sweep

__all__ = ["check", "commands", "sweep"]
