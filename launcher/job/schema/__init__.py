"""The schema of a request: every key, its type, and which keys are secret.

Opens no files and does not import Hydra.
"""

__all__ = [
    "base",
    "checkpoint",
    "cluster",
    "components",
    "data",
    "debug",
    "did_you_mean",
    "job",
    "keys",
    "launch",
    "logger",
    "models",
    "objective",
    "optim",
    "parallel",
    "paths",
    "redact",
    "search",
    "steps",
    "train",
    "user_class",
]
