"""Values that plans are made of: grids, layouts, facts of a model, dtypes, and how they are written.

No decision.
"""

__all__ = [
    "batch_reading",
    "compilation",
    "drill",
    "facts",
    "grid",
    "layout",
    "module_names",
    "operations",
    "optimizer_state",
    "optimizer_traits",
    "param_group",
    "precision",
    "recomputed",
    "setting",
    "text",
    "trust",
]
