"""The world of a rank: what torchrun or srun says about it, where ranks meet, and over which network."""

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
