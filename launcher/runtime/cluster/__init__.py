"""The world of a rank: its environment under torchrun or srun, the rendezvous, messages, and the network."""

__all__ = ["launch_env", "messages", "network", "rendezvous", "world"]
