"""The schema of a request: every key, its type, and which keys are secret.

Opens no files and does not import Hydra.
"""

__all__ = [
    "base",
    "cluster",
    "components",
    "drill",
    "job",
    "kubernetes",
    "loggers",
    "objectives",
    "optimizers",
    "parallel",
    "redact",
    "run_paths",
    "schedules",
    "schema_keys",
    "search",
    "similar_names",
    "steps",
    "sweep",
]
