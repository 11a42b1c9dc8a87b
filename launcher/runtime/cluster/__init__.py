"""The world of a rank: what torchrun or srun says about it, where ranks meet, and over which network."""

__all__ = ["launch_env", "messages", "network", "rendezvous", "world"]
