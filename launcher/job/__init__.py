"""The request: its schema, its composition with Hydra, where each value was set, the user's own classes.

Nothing here decides anything (that is ``plan``) and nothing here imports torch.
"""

__all__ = [
    "args",
    "completion",
    "compose",
    "config_folders",
    "help",
    "origins",
    "overrides",
    "sweep_grid",
    "targets",
    "usage",
]
