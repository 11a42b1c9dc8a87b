"""What torchrun or srun says about this process, where its ranks meet, and by which network."""

__all__ = [
    "interfaces",
    "interruptible",
    "launch_env",
    "network",
    "outer_rendezvous",
    "signed_messages",
    "typed_json",
    "value_collectives",
    "world",
]
