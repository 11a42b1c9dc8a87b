"""The model cut into stages, and the parameters of each."""

__all__ = [
    "debug_graphs",
    "sequence_chunks",
    "stages",
    "tensor_placement",
    "traced_model",
    "uncut_modules",
]
