"""The interface for the core, which reaches no other module of this folder."""

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.onto_plan import shard_operators
from launcher.extras.device_matrix.operator_names import main_operators
from launcher.extras.device_matrix.resolve import Sharding
from launcher.extras.device_matrix.run.apply import (
    Weights,
    cut_parameters,
    matrix_share,
    run_sharded,
    stage_groups,
)
from launcher.extras.device_matrix.run.program import StageGroups
from launcher.extras.device_matrix.show import operators_json, sharding_json, sharding_rows

__all__ = [
    "Sharding",
    "StageGroups",
    "TensorLayout",
    "Weights",
    "cut_parameters",
    "main_operators",
    "matrix_share",
    "operators_json",
    "run_sharded",
    "shard_operators",
    "sharding_json",
    "sharding_rows",
    "stage_groups",
]
