"""The interface for the core, which reaches this folder only through it and ``merge_step``."""

from launcher.extras.mindspore.convert import (
    Layouts,
    RankConversion,
    laid_out,
    of_checkpoint,
    of_rank_folders,
    open_full_tensors,
    write_ranks,
)
from launcher.extras.mindspore.from_ours import stage_files
from launcher.extras.mindspore.functions import (
    build_searched_strategy,
    load_segmented_checkpoints,
    merge_pipeline_strategies,
    merge_pipeline_strategys,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from launcher.extras.mindspore.layouts_without_checkpoint import on_paper
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.operator_strategies import (
    is_mindspores,
    node_strategies,
    node_text,
    of_flow,
    of_sharding,
    strategies,
)
from launcher.extras.mindspore.rank_files import (
    RankSource,
    full_copy,
    held_boxes,
    open_source,
    rank_paths,
    write_held,
)
from launcher.extras.mindspore.shapes_of_slices import of_full_tensors
from launcher.extras.mindspore.strategy import StrategyFile
from launcher.extras.mindspore.strategy_argument import StrategyInput, by_stage, listed, only_names
from launcher.extras.mindspore.strategy_file import GroupFile, groups_text, read_strategy, strategy_text

__all__ = [
    "GroupFile",
    "Layouts",
    "RankConversion",
    "RankSource",
    "StrategyFile",
    "StrategyInput",
    "build_searched_strategy",
    "by_stage",
    "full_copy",
    "groups_text",
    "held_boxes",
    "is_mindspores",
    "laid_out",
    "listed",
    "load_segmented_checkpoints",
    "merge_pipeline_strategies",
    "merge_pipeline_strategys",
    "merged_file",
    "node_strategies",
    "node_text",
    "of_checkpoint",
    "of_flow",
    "of_full_tensors",
    "of_rank_folders",
    "of_sharding",
    "on_paper",
    "only_names",
    "open_full_tensors",
    "open_source",
    "rank_list_for_transform",
    "rank_paths",
    "read_strategy",
    "stage_files",
    "strategies",
    "strategy_text",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "write_held",
    "write_ranks",
]
