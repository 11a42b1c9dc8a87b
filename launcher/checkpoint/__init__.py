"""Tensors at rest: shards, layouts, strategies, transforms, exports.

No process group and no torch import; works on a login node, in memory that does not grow with the model.
"""

from launcher.checkpoint.export import export, read_full
from launcher.checkpoint.foreign.hf_read import HfFolder, read_hf
from launcher.checkpoint.foreign.hf_write import write_hf
from launcher.checkpoint.foreign.import_tensors import import_full
from launcher.checkpoint.foreign.rename import Renamed, Table, renamed
from launcher.checkpoint.inspect import Holding, holdings, inspect
from launcher.checkpoint.layout.derived import target_strategy
from launcher.checkpoint.layout.strategy import Entry, Strategy, single
from launcher.checkpoint.mindspore.api import (
    build_searched_strategy,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from launcher.checkpoint.mindspore.load_segmented import load_segmented_checkpoints
from launcher.checkpoint.mindspore.merge_files import merge_pipeline_strategies, merge_pipeline_strategys
from launcher.checkpoint.read import Checkpoint, each, open_checkpoint, read_box, read_extra, read_rank
from launcher.checkpoint.store import commit, latest, partial, prune, step_folder
from launcher.checkpoint.tensorfile.blob import Blob
from launcher.checkpoint.transform import Report, transform
from launcher.checkpoint.transform_plan import Source, Span, TransformPlan, plan_transform
from launcher.checkpoint.verify import verify
from launcher.checkpoint.write import RankRecord, write_rank
from launcher.plan.values.trust import Trust

__all__ = [
    "Blob",
    "Checkpoint",
    "Entry",
    "HfFolder",
    "Holding",
    "RankRecord",
    "Renamed",
    "Report",
    "Source",
    "Span",
    "Strategy",
    "Table",
    "TransformPlan",
    "Trust",
    "build_searched_strategy",
    "commit",
    "each",
    "export",
    "holdings",
    "import_full",
    "inspect",
    "latest",
    "load_segmented_checkpoints",
    "merge_pipeline_strategies",
    "merge_pipeline_strategys",
    "open_checkpoint",
    "partial",
    "plan_transform",
    "prune",
    "rank_list_for_transform",
    "read_box",
    "read_extra",
    "read_full",
    "read_hf",
    "read_rank",
    "renamed",
    "single",
    "step_folder",
    "target_strategy",
    "transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "verify",
    "write_hf",
    "write_rank",
]
