"""The lab runs to its end without a device, so that its errors do not first appear on one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu import results
from benchmarks.gpu.kernel_groups import GROUPS, group
from benchmarks.gpu.lab import Lab, Part, Row
from benchmarks.gpu.parts import parts
from benchmarks.gpu.starts import counted
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results" / "gpu").glob("*.jsonl"))


def dry(folder: Path, *words: str) -> tuple[int, dict[str, Row]]:
    """The exit code and the rows of a dry run of the lab, by part; ``folder`` has its record."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--device", "cpu", "--write", str(folder), *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"part"')]
    assert lines, run.stdout + run.stderr
    return run.returncode, {row["part"]: Row(**{"why": ""} | row) for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dry run of the lab with three parts, all of which succeeded."""
    folder: Path = tmp_path_factory.mktemp("lab")
    code, rows = dry(folder, "--only", "train.eager", "train.parity", "kernels")
    assert {name: row.why for name, row in rows.items()} == {"train.eager": "", "train.parity": "", "kernels": ""}
    assert code == 0
    return folder


def values(folder: Path, part: str) -> dict[str, Any]:
    [record] = folder.glob("*.jsonl")
    return next(row.values for row in results.read(record)[1] if row.part == part)


def test_training_is_measured_beside_its_plan(written: Path) -> None:
    eager = values(written, "train.eager")
    assert abs(eager["planned_bytes"] / eager["measured_bytes"] - 1) <= 0.05
    assert eager["planned_ms"] is None  # no cluster is named
    assert eager["planned_ms_with_cluster"] > 0
    assert eager["ms_min"] <= eager["ms"] <= eager["ms_max"]
    assert eager["tokens_per_s"] == pytest.approx(64 / eager["ms"] * 1e3, rel=0.01)


def test_the_kernels_of_a_step_are_told_by_name_and_by_group(written: Path) -> None:
    eager = values(written, "train.eager")
    assert sum(eager["groups_ms"].values()) == pytest.approx(eager["kernels_ms"], abs=0.05)
    assert all(eager["groups_ms"][name] > 0 for name in ("products", "attention", "rest"))
    times = [ms for _, _, ms in eager["kernels"]]
    assert times == sorted(times, reverse=True)


def test_losses_are_those_of_a_hand_written_loop(written: Path) -> None:
    assert values(written, "train.parity")["losses_apart"] <= 1e-6


def test_the_device_is_written_as_a_fragment_of_a_cluster(written: Path) -> None:
    [fragment] = written.glob("*.yaml")
    device = yaml.safe_load(fragment.read_text())
    assert list(device) == ["device", "dtype", "memory_gb", "peak_tflops", "matmul", "copy_gb_per_s", "blocks"]
    assert device["peak_tflops"] is None
    assert all(p["tflops"] > 0 and p["efficiency"] is None for p in device["matmul"])
    assert [(p["m"], p["n"], p["k"]) for p in device["matmul"][-3:]] == [(32, 32, 32), (32, 64, 32), (32, 128, 32)]
    assert len(device["copy_gb_per_s"]) == 5
    assert list(device["blocks"]) == ["embedding", "norm", "attention", "feed-forward", "block", "head", "loss"]
    assert all(b["forward_ms"] > 0 for b in device["blocks"].values())


def test_a_page_to_read_stands_beside_the_record(written: Path) -> None:
    [page] = written.glob("*.md")
    heads = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert heads == [
        "## Training", "## Kernels of one step", "## Attention", "## Blocks of 2 x 16 tokens", "## Products",
        "## Copies",
    ]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_page_of_a_kept_record_is_made_of_it(record: Path) -> None:
    assert results.page(*results.read(record)) == record.with_suffix(".md").read_text()


# a script for a part: argv has --run NAME --folder FOLDER
CHILD = """
import json, sys, time
from pathlib import Path
name, folder = sys.argv[2], Path(sys.argv[4])
def report(**values):
    with (folder / "values.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\\n")
report(began=time.time())
if name.startswith("timed"):
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    report(turn=time.time())
time.sleep(60 if "hangs" in name else 0.3)
report(ended=time.time())
if "fails" in name:
    sys.exit("no such thing")
"""


def lab(folder: Path, *every: Part, seconds: float = 50) -> dict[str, Row]:
    rows = list(Lab(every, [sys.executable, "-c", CHILD], folder=folder, seconds=seconds, cores=4).run())
    return {row.part: row for row in rows}


def test_a_part_over_its_limit_tells_what_it_knew(tmp_path: Path) -> None:
    began = time.monotonic()
    rows = lab(tmp_path, Part("hangs", 2), Part("fails", 30), Part("fine", 30))
    assert time.monotonic() - began < 30
    assert list(rows["hangs"].values) == ["began"]
    assert {name: row.why for name, row in rows.items()} == {
        "hangs": "cut off at its limit of 2 s",
        "fails": "exit code 1: no such thing",
        "fine": "",
    }
    assert [row.ok for row in rows.values()].count(True) == 1


def test_when_the_time_is_over_every_part_has_a_row(tmp_path: Path) -> None:
    rows = lab(
        tmp_path, Part("hangs", 50), Part("timed", 50, timed=True), Part("timed.next", 50, timed=True), seconds=2
    )
    assert {row.why for row in rows.values()} == {"the 2 s of the lab were over"}
    assert list(rows) == ["hangs", "timed", "timed.next"]


def test_timed_parts_prepare_first_and_run_alone(tmp_path: Path) -> None:
    rows = lab(
        tmp_path, Part("one", 30), Part("timed.1", 30, timed=True), Part("two", 30), Part("timed.2", 30, timed=True)
    )
    first, second = rows["timed.1"].values, rows["timed.2"].values
    assert max(rows[name].values["ended"] for name in ("one", "two")) <= first["turn"]
    assert first["ended"] <= second["turn"]
    assert second["began"] < first["turn"]


def test_names_choose_parts_and_their_first_names_choose_several() -> None:
    every = list(parts())
    assert [p.name for p in every if p.chosen(["start"])] == ["start.default", "start.one", "start.several"]
    assert [p.name for p in every if p.chosen(["train.eager", "tests"])] == ["tests", "train.eager"]
    assert len({p.name for p in every}) == len(every)


RUNNING = """
tests/gpu/test_device.py::test_one[cuda] PASSED [ 20%]
[gw1] [ 40%] FAILED tests/gpu/test_device.py::test_two[cuda-full]
[gw0] [ 60%] PASSED tests/gpu/test_device.py::test_three[cuda]
"""
SUMMARY = """=========================== short test summary info ============================
FAILED tests/gpu/test_device.py::test_two[cuda-full] - assert 1 == 2
1 failed, 2 passed in 3.00s
"""


@pytest.mark.parametrize(
    ("text", "name"), [(RUNNING, ""), (RUNNING + SUMMARY, " - assert 1 == 2")], ids=["cut off", "ended"]
)
def test_tests_are_counted_also_while_they_run(text: str, name: str) -> None:
    assert counted(text) == {"counts": {"passed": 2, "failed": 1}, "failures": [f"test_two[cuda-full]{name}"]}


# as an H100 named them on 2026-11-27
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NTN", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("void cudnn::fusion::fmha_reduce_head<true>(void const*, void*)", "attention"),
        ("triton_poi_fused__to_copy_add_arange_cat_cos_div_mul_neg_pow_sin_slice_view_6", "rest"),
        ("void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16>", "rest"),
    ],
)  # fmt: skip
def test_kernels_are_grouped_by_the_names_that_libraries_give_them(name: str, expected: str) -> None:
    assert group(name) == expected
    assert expected in {"rest", *(word for word, _ in GROUPS)}


@exhaustive
@pytest.mark.timeout(1500)
def test_every_part_is_tried(tmp_path: Path) -> None:
    _, rows = dry(tmp_path, "--seconds", "1100")
    assert set(rows) == {part.name for part in parts()}
    absent = set() if find_spec("transformers") else {"reference.transformers"}
    assert {name: row.why for name, row in rows.items() if not row.ok and name not in absent} == {}
    assert all(row.values["holds"] for name, row in rows.items() if name.startswith("certify"))
