from __future__ import annotations

from pathlib import Path

import pytest

from launcher.plan.fits_free_memory import Free
from launcher.runtime.free_memory import available_memory, ram

MB = 1 << 20


def machine(home: Path, member: str, *mounts: str, kb: int = 8 << 20) -> Path:
    """A fake ``/proc`` with ``kb`` KB available; ``/cgroup`` in ``mounts`` is a folder below ``home``."""
    proc = home / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {kb} kB\n")
    (proc / "self/cgroup").write_text(member + "\n")
    lines = [f"35 31 0:32 {m.replace('/cgroup', f'{home}/cgroup')}" for m in mounts]
    (proc / "self/mountinfo").write_text("\n".join(["22 1 254:0 / / rw - ext4 /dev/vda rw", *lines]) + "\n")
    return proc


def group(folder: Path, version: int, limit: str, used_mb: int, cache_mb: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    one = version == 1
    (folder / ("memory.limit_in_bytes" if one else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if one else "memory.current")).write_text(f"{used_mb * MB}\n")
    name = "total_inactive_file" if one else "inactive_file"
    (folder / "memory.stat").write_text(f"cache 1\n{name} {cache_mb * MB}\n")


def test_without_control_groups_it_is_what_the_kernel_can_give(tmp_path: Path) -> None:
    assert ram(machine(tmp_path, "0::/")) == Free(8 << 30)
    assert available_memory(4, "cpu", tmp_path / "proc") == Free(8 << 30)


def test_where_the_kernel_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    assert ram(tmp_path) is None
    assert available_memory(4, "cuda", tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_counts_without_the_page_cache_that_can_go(version: int, tmp_path: Path) -> None:
    member, mount = ("8:memory:/job/step", "/ /cgroup rw - cgroup cgroup rw,memory")
    if version == 2:
        member, mount = "0::/job/step", "/ /cgroup rw - cgroup2 cgroup2 rw"
    proc = machine(tmp_path, member, mount)
    group(tmp_path / "cgroup/job/step", version, str(1000 * MB), used_mb=300, cache_mb=50)
    assert ram(proc) == Free(750 * MB, f"this machine for the control group {tmp_path}/cgroup/job/step")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_above_counts(version: int, tmp_path: Path) -> None:
    member, mount = ("8:cpu,memory:/job/step", "/ /cgroup rw - cgroup cgroup rw,cpu,memory")
    if version == 2:
        member, mount = "0::/job/step", "/ /cgroup rw - cgroup2 cgroup2 rw"
    proc = machine(tmp_path, member, mount)
    none = "9223372036854771712" if version == 1 else "max"
    group(tmp_path / "cgroup/job/step", version, none, 300, 0)
    group(tmp_path / "cgroup/job", version, str(500 * MB), 400, 0)
    group(tmp_path / "cgroup", version, str(4000 * MB), 400, 0)
    assert ram(proc) == Free(100 * MB, f"this machine for the control group {tmp_path}/cgroup/job")


def test_in_a_container_the_group_is_where_its_part_of_the_tree_is_mounted(tmp_path: Path) -> None:
    proc = machine(tmp_path, "8:memory:/docker/abc", "/docker/abc /cgroup rw - cgroup cgroup rw,memory")
    group(tmp_path / "cgroup", 1, str(500 * MB), 400, 0)
    assert ram(proc) == Free(100 * MB, f"this machine for the control group {tmp_path}/cgroup")


def test_a_limit_above_what_is_there_changes_nothing(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/", "/ /cgroup rw - cgroup2 cgroup2 rw", kb=100 << 10)
    group(tmp_path / "cgroup", 2, str(500 * MB), 0, 0)
    assert ram(proc) == Free(100 * MB)


def test_more_in_use_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/", "/ /cgroup rw - cgroup2 cgroup2 rw")
    group(tmp_path / "cgroup", 2, str(100 * MB), 400, 0)
    assert ram(proc) == Free(0, f"this machine for the control group {tmp_path}/cgroup")


def test_devices_are_asked_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((i + 1) << 30, 80 << 30))
    assert available_memory(2, "cuda", machine(tmp_path, "0::/")) == Free(
        8 << 30, devices=(1 << 30, 2 << 30), kind="cuda"
    )


def test_devices_that_do_not_answer_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(_: int) -> None:
        raise RuntimeError("no CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert available_memory(2, "cuda", tmp_path / "proc") is None
    assert available_memory(2, "cuda", machine(tmp_path, "0::/")) is None
