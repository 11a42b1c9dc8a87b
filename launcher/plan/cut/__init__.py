"""The model cut into stages, and the parameters of each."""

__all__ = [
    "params",
    "sequence_chunks",
    "stage_config",
    "stage_graph",
    "stage_graph_svg",
    "stages",
    "traced_model",
]
