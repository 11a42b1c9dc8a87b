"""``benchmarks/gpu.py`` runs to its end where there is no GPU, so that its first hour on one is not its first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.job.schema.job import Train
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[2]
HEADS = ["## Steps", "## Blocks, a micro batch of 2 x 16 tokens", "## Products", "## Copies"]


def dry(folder: Path, *words: str) -> str:
    """The page that it writes."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--blocks", "1", "--steps", "1", "--write", str(folder)]
    run = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return (folder / "gpu-cpu-dry.md").read_text()


def steps(page: str) -> dict[str, list[str]]:
    """The rows of the table of steps, by name."""
    table = page.partition("## Steps\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: cells for name, *cells in rows}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the page and the fragment of one that tries one row more."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    dry(folder, "--only", "plain", "--row", "fp16=train.precision=fp16; train.loss_scale=1")
    return folder


def test_a_row_has_the_losses_of_the_hand_written_loop_and_the_memory_of_the_plan(written: Path) -> None:
    page = (written / "gpu-cpu-dry.md").read_text()
    assert re.findall("^## .*", page, re.MULTILINE) == HEADS
    found = steps(page)
    assert list(found) == ["plain", "fp16"]
    for cells in found.values():
        assert abs(float(cells[8].removesuffix("%"))) <= 5
        assert float(cells[10]) <= 1e-6


def test_the_device_is_written_as_a_fragment_of_a_cluster(written: Path) -> None:
    device = yaml.safe_load((written / "gpu-cpu-dry.yaml").read_text())
    assert list(device) == ["device", "dtype", "memory_gb", "peak_tflops", "matmul", "copy_gb_per_s", "blocks"]
    assert device["peak_tflops"] is None
    assert all(p["tflops"] > 0 and p["efficiency"] is None for p in device["matmul"])
    assert [(p["m"], p["n"], p["k"]) for p in device["matmul"][-3:]] == [(32, 32, 32), (32, 64, 32), (32, 128, 32)]
    assert len(device["copy_gb_per_s"]) == 5
    assert list(device["blocks"]) == ["embedding", "norm", "attention", "feed-forward", "block", "head", "loss"]
    assert all(b["forward_ms"] > 0 for b in device["blocks"].values())


@exhaustive
@pytest.mark.timeout(1200)
def test_every_row_is_tried_or_says_why_not(tmp_path: Path) -> None:
    for name, cells in steps(dry(tmp_path)).items():
        if "compile" in name and "compile" not in Train.model_fields:
            assert cells[0] == "not tried: train.compile: unknown key"
        else:
            assert float(cells[10]) <= 1e-3, name
