"""Scripts that convert a checkpoint offline, one per program; ``bad_checkpoints`` runs them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

SCRIPT = """
import sys
try:
    {}
except BaseException as error:
    print("\\0" + type(error).__name__ + ": " + " ".join(str(error).split()))
"""
NAMED = "transform_checkpoints(*sys.argv[1:6], output_format='safetensors')"
CALLS = {
    "mindspore": f"from mindspore import transform_checkpoints; {NAMED}",
    "files": f"from launcher.checkpoint import transform_checkpoints; {NAMED}",
    "own": (
        "from pathlib import Path; from launcher.checkpoint import transform; "
        "from launcher.checkpoint.layout import strategy_file; "
        "transform(Path(sys.argv[1]), Path(sys.argv[2]), strategy_file.load(Path(sys.argv[5])))"
    ),
    "dcp": (
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save; "
        "import os; os.mkdir(sys.argv[2]); dcp_to_torch_save(sys.argv[1], sys.argv[2] + '/whole.pt')"
    ),
    "deepspeed": (
        "import os, torch; "
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get; "
        "found = {n: t.clone() for n, t in get(sys.argv[1]).items()}; "
        "os.mkdir(sys.argv[2]); torch.save(found, sys.argv[2] + '/whole.pt')"
    ),
}


@dataclass(frozen=True)
class Program:
    """A column of the table: the interpreter ``python`` runs ``call`` on checkpoints in the form ``form``."""

    name: str
    call: str
    python: str
    form: str


def run(program: Program, *arguments: str) -> str | None:
    """Return how the program failed: its message, "it hangs", or its exit code.

    ``None`` means that it reported no error.
    """
    command = [program.python, "-W", "ignore", "-c", SCRIPT.format(CALLS[program.call]), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if "\0" in done.stdout:
        return done.stdout.rpartition("\0")[2].strip()
    return f"exit code {done.returncode}: {done.stderr.strip()[-200:]}" if done.returncode else None
