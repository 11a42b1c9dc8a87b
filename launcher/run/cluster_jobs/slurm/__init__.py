"""A run as a job of Slurm: its batch file is written, submitted and queried. Its ranks join as under srun."""

__all__ = ["array_file", "batch_file", "cluster", "stop_signal", "submit"]
