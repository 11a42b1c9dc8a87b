"""MindSpore's files: strategies in both forms, group files, ``.ckpt`` tensors, encrypted or not.

Nothing here imports torch. ``cryptography`` is imported only for an encrypted file.
"""

from launcher.checkpoint.mindspore.formats.ckpt_read import Ckpt, CkptEntry, open_ckpt
from launcher.checkpoint.mindspore.formats.ckpt_write import text_bytes, write_ckpt
from launcher.checkpoint.mindspore.formats.encryption import MODES, CipherMode
from launcher.checkpoint.mindspore.formats.from_ours import merged_file, stage_files
from launcher.checkpoint.mindspore.formats.group_file import GroupFile
from launcher.checkpoint.mindspore.formats.strategy import (
    Operator,
    Slicing,
    StrategyFile,
    StrategyForm,
    merge,
)
from launcher.checkpoint.mindspore.formats.strategy_files import (
    form_of,
    read_stages,
    read_strategy,
    write_strategy,
)
from launcher.checkpoint.mindspore.formats.to_ours import full_specs, to_strategy

__all__ = [
    "MODES",
    "CipherMode",
    "Ckpt",
    "CkptEntry",
    "GroupFile",
    "Operator",
    "Slicing",
    "StrategyFile",
    "StrategyForm",
    "form_of",
    "full_specs",
    "merge",
    "merged_file",
    "open_ckpt",
    "read_stages",
    "read_strategy",
    "stage_files",
    "text_bytes",
    "to_strategy",
    "write_ckpt",
    "write_strategy",
]
