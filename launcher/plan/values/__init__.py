"""Values that plans are made of: grids, layouts, facts of a model, dtypes, and how they are written.

They decide nothing.
"""

__all__ = [
    "class_dims",
    "compilation",
    "dtypes",
    "grid",
    "layout",
    "model_graph",
    "module_names",
    "note",
    "operations",
    "optimizer",
    "precision",
    "recomputed_module",
    "resolved",
    "setting",
    "tensor_spec",
    "text",
]
