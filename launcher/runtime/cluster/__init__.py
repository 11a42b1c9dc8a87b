"""What torchrun or srun says about this process, and where its ranks meet."""
