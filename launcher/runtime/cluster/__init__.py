"""What torchrun or srun says about this process, and where its ranks meet."""

__all__ = ["launch_env", "outer_rendezvous", "world"]
