"""Ranks start beside accelerators, whatever the parent process or a user's module has done before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_accelerator.on_devices.processes import launched
from tests.runtime.processes.test_fork_server import REQUEST, SCRIPT, own_request, python

SPOILERS = {
    "a backward": "(torch.ones(3, requires_grad=True) * 2).sum().backward()",
    "a tensor on a device": "torch.ones(3, device='fake')",
    "a backward on a device": "(torch.ones(3, device='fake', requires_grad=True) * 2).sum().backward()",
}
KINDS = ["cpu", "fake"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_ran_a_backward_is_no_parent_of_ranks(kind: str, tmp_path: Path) -> None:
    assert "done in" in launched(*REQUEST, f"launch.device={kind}", folder=tmp_path / "run").out


def test_more_ranks_than_devices_are_on_the_cpu_and_that_is_said(tmp_path: Path) -> None:
    out = launched(*REQUEST, "launch.nproc=8", "train.batch_size=32", folder=tmp_path / "run").out
    assert "launch.device auto -> cpu: 8 ranks on this machine, torch sees 4 fake" in " ".join(out.split())


@pytest.mark.parametrize(
    ("spoiler", "where", "kind"),
    [
        ("a backward", "spoiler", "cpu"),
        ("a backward", "inside", "fake"),
        ("a tensor on a device", "inside", "cpu"),
        ("a tensor on a device", "spoiler", "fake"),
        ("a backward on a device", "spoiler", "cpu"),
        ("a backward on a device", "inside", "fake"),
    ],
)
def test_a_users_module_may_use_a_device(spoiler: str, where: str, kind: str, tmp_path: Path) -> None:
    own_request(tmp_path, **{where: SPOILERS[spoiler]})
    code = "from launcher.__main__ import script; script()"
    done = python(code, tmp_path, "recipe=r.yaml", "run_dir=run", f"launch.device={kind}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done in" in done.stdout


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_program_that_has_used_a_device_runs_a_job(spoiler: str, tmp_path: Path) -> None:
    code = SCRIPT.format(before=SPOILERS[spoiler], call="run()", request=list(REQUEST), folder=tmp_path)
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("figures ['loss']") == 1
