"""Tensors at rest: shards, layouts, strategies, transforms, exports.

No process group and no torch import; works on a login node, in memory that does not grow with the model.
"""

from launcher.checkpoint.blob import Blob
from launcher.checkpoint.export import export, read_full
from launcher.checkpoint.read import Checkpoint, each, open_checkpoint, read_box, read_extra, read_rank
from launcher.checkpoint.store import commit, latest, partial, prune, step_folder
from launcher.checkpoint.strategy import Entry, Strategy, single
from launcher.checkpoint.strategy_file import merge_pipeline_strategies, merge_pipeline_strategys
from launcher.checkpoint.target import target_strategy
from launcher.checkpoint.transform import Report, transform
from launcher.checkpoint.verify import verify
from launcher.checkpoint.write import RankRecord, write_rank

__all__ = [
    "Blob",
    "Checkpoint",
    "Entry",
    "RankRecord",
    "Report",
    "Strategy",
    "commit",
    "each",
    "export",
    "latest",
    "merge_pipeline_strategies",
    "merge_pipeline_strategys",
    "open_checkpoint",
    "partial",
    "prune",
    "read_box",
    "read_extra",
    "read_full",
    "read_rank",
    "single",
    "step_folder",
    "target_strategy",
    "transform",
    "verify",
    "write_rank",
]
