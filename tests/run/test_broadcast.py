"""A load that reads each byte once per replica group, and the state after it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.run.launching import run, shape, status, tensors

AGAIN = ("steps=[load,broadcast,save]", *shape(pp=2, replicate=2), "optim=momentum")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "run"
    return run(folder, *shape(pp=2, replicate=2), "optim=momentum", steps=2) / "checkpoints" / "step-000002"


@pytest.mark.parametrize("layout", [shape(pp=2, replicate=2), shape(pp=1, replicate=2, shard=2)], ids=["same", "other"])
def test_a_broadcast_load_reads_half_and_leaves_the_same_bytes(
    source: Path, tmp_path: Path, capfd: Any, layout: list[str]
) -> None:
    saved, read = [], []
    for name, flag in (("all", "false"), ("once", "true")):
        words = [*AGAIN, *layout, f"steps.load.path={source}", f"steps.load.broadcast={flag}"]
        folder = run(tmp_path / name, *words)
        saved.append({n: b for n, b in tensors(folder, 2).items() if "extra" not in n})
        read.append(status(folder)["metrics"])
    assert saved[0] == saved[1]
    assert read[0]["load_bytes_read"] == read[0]["load_bytes_held"] == read[1]["load_bytes_held"]
    assert read[1]["load_bytes_read"] * 2 == read[1]["load_bytes_held"]
    said = capfd.readouterr().out
    assert re.search(r"load: loaded \S+, after 2 steps; ranks read (.*) and hold \1\n", said)
    assert re.search(
        r"load: loaded \S+, after 2 steps; ranks read .* and hold .*; the rest was broadcast, all digests agree\n",
        said,
    )
    sent = r"broadcast: sent \d+ tensors from the first rank .* in 1 collective, .*; all digests agree\n"
    assert re.search(sent, said)
