"""Values that plans are made of: grids, layouts, facts of a model, dtypes, and how they are written.

No decision.
"""

__all__ = [
    "dtypes",
    "facts",
    "grid",
    "layout",
    "module_names",
    "operations",
    "optimizer",
    "resolved",
    "setting",
    "text",
]
