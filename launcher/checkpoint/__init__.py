"""Checkpoints: shards, layouts, strategies, transforms, exports.

The package needs no process group and does not import torch. It works on a login node, in memory that does
not grow with the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.checkpoint.export_one_file import export, read_full
from launcher.checkpoint.foreign.hugging_face import HfFolder, read_hf, write_hf
from launcher.checkpoint.foreign.import_checkpoint import import_full
from launcher.checkpoint.foreign.names import Renamed, Table, renamed
from launcher.checkpoint.layout.derive_strategy import target_strategy
from launcher.checkpoint.layout.strategy import Entry, Strategy, single
from launcher.checkpoint.read import Checkpoint, each, open_checkpoint, read_box, read_extra, read_rank
from launcher.checkpoint.store import commit, latest, partial, prune, step_folder
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.checkpoint.transform import Report, Source, Span, TransformPlan, plan_transform, transform
from launcher.checkpoint.verify import Holding, holdings, inspect, verify
from launcher.checkpoint.write import RankRecord, write_rank
from launcher.optional import mindspore
from launcher.plan.resolve.encryption import Trust

if TYPE_CHECKING:
    build_searched_strategy = mindspore.build_searched_strategy
    load_segmented_checkpoints = mindspore.load_segmented_checkpoints
    merge_pipeline_strategies = mindspore.merge_pipeline_strategies
    merge_pipeline_strategys = mindspore.merge_pipeline_strategys
    rank_list_for_transform = mindspore.rank_list_for_transform
    transform_checkpoint_by_rank = mindspore.transform_checkpoint_by_rank
    transform_checkpoints = mindspore.transform_checkpoints

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

_OF_MINDSPORE = {
    "build_searched_strategy",
    "load_segmented_checkpoints",
    "merge_pipeline_strategies",
    "merge_pipeline_strategys",
    "rank_list_for_transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
}
"""Functions with MindSpore's names and arguments. They are an optional part of an installation."""


def __getattr__(name: str) -> Any:
    if name in _OF_MINDSPORE:
        return getattr(mindspore, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
