"""A run as a job of Slurm: its batch file, and what Slurm is asked. Inside, ranks join as under any srun."""

__all__ = ["array_file", "batch_file", "cluster", "stop_signal", "submit"]
