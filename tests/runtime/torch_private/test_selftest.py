"""If torch lacks something that we build on, the error names it at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from launcher.errors import RequestError
from launcher.runtime.torch_private.selftest import COMPILING, PARTS, verify


def test_the_torch_at_hand_has_all_parts():
    verify()
    verify(COMPILING)


def test_everything_that_is_missing_is_said_in_one_error():
    schedules = "torch.distributed.pipelining.schedules"
    parts = (
        (schedules, "_Action", ("stage_index", "colour")),
        (schedules, "_Gone.method", ()),
        ("torch.distributed.nowhere", "thing", ()),
        *PARTS,
    )
    with pytest.raises(RequestError) as refused:
        verify(parts)
    assert str(refused.value) == (
        f"this version cannot use torch {torch.__version__}: {schedules}._Action has no argument 'colour'; "
        f"{schedules}._Gone.method does not exist; torch.distributed.nowhere.thing does not "
        "exist (try: pip install 'torch>=2.11,<2.16')"
    )


def test_a_missing_part_of_torch_is_reported_before_an_import_fails():
    code = (
        "import torch.distributed.pipelining.schedules as s\n"
        "del s._PipelineScheduleRuntime\n"
        "import launcher.runtime.torch_private.pipelining\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    schedules = "torch.distributed.pipelining.schedules._PipelineScheduleRuntime"
    assert done.stderr.strip().splitlines()[-1] == (
        f"launcher.errors.RequestError: this version cannot use torch {torch.__version__}: "
        f"{schedules}._assert_unsharded does not exist; {schedules}.step does not "
        f"exist; {schedules}._prepare_schedule_with_comms does not exist "
        "(try: pip install 'torch>=2.11,<2.16')"
    )
