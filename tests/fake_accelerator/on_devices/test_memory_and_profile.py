"""A device without free memory, and a device that is profiled."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.fake_accelerator.on_devices.processes import fresh, launched
from tests.run.launching import TINY, events, shape

SIZE = r"[0-9.]+ [KMG]?B"
LM = (
    "recipe=lm_single", "data=random_tokens", "steps=[train]", "train.steps=2", "launch.device=fake", "launch.nproc=2",
)  # fmt: skip


def test_the_cure_for_an_out_of_memory_error_trains_when_pasted(tmp_path: Path) -> None:
    code, said = fresh(*LM, "launch.check_memory=false", folder=tmp_path / "run", memory_mb=60)
    assert code == 1
    at = next(n for n, line in enumerate(said) if line.startswith("error: "))
    assert "out of memory" in said[at], "\n".join(said)
    assert re.fullmatch(
        rf"error: rank ([01]): out of memory on fake:\1, an allocation of {SIZE} failed: "
        rf"of 60\.0 MB its tensors used {SIZE}, its allocator kept {SIZE}, others used {SIZE}; {SIZE} was free",
        said[at],
    )
    assert re.fullmatch(rf"  planned: {SIZE} \(activations {SIZE}, optimizer {SIZE}, params {SIZE}\)", said[at + 1])
    cure = re.fullmatch(rf"  try: (.*) \(planned: {SIZE}\)", said[at + 2])
    assert cure is not None

    # with the proposed settings it trains on the same devices
    code, said = fresh(*LM, *cure[1].split(" "), folder=tmp_path / "again", memory_mb=60)
    assert code == 0, "\n".join(said)


def test_the_plan_is_an_upper_bound_of_what_a_device_holds(tmp_path: Path) -> None:
    """Law 4 on a device without kernels for attention and norms: torch decomposes both."""
    for device in ("auto", "fake"):
        folder = tmp_path / device
        done = launched(*LM, f"launch.device={device}", folder=folder)
        planned = json.loads((folder / "plan.json").read_text())["memory"][0]["total"]
        assert 0.99 * planned < max(row["memory_mb"] for row in done.rows) * 2**20 <= planned


def test_a_window_is_profiled_on_a_device_that_the_profiler_does_not_see(tmp_path: Path) -> None:
    words = (*TINY, *shape(), "launch.device=fake", "steps=[train]", "train.steps=3")
    done = launched(*words, "debug.profiler={steps: [2, 2], memory: true}", folder=tmp_path / "run")
    assert "debug.profiler.memory: torch has no memory snapshots for fake\n" in done.out
    assert any(e.get("name") == "aten::mm" for e in events(done.folder, 0))
    assert (done.folder / "profile" / "rank0.txt").read_text().splitlines()[1].split()[-1] == "operator"
