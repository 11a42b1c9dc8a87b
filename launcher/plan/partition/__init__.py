"""The cut: which module is on which stage, where each tensor lives, how a batch is divided."""

__all__ = [
    "params",
    "rank_groups",
    "sequence_chunks",
    "sizes",
    "stage_config",
    "stage_graph",
    "stage_graph_svg",
    "stages",
]
