"""The command on devices: what is chosen and refused, every verb, and checkpoints that move to the CPU and back."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checkpoint.read import open_checkpoint, read_extra
from tests.fake_accelerator.on_devices.processes import Done, fresh, launched
from tests.pages import ROOT
from tests.run.launching import BATCH, TINY, shape, tensors

DEVICE = (*TINY, "launch.device=fake", "schedule=constant")
KEPT = ("train.precision=fp64", "checkpoint.every=2", "checkpoint.keep=null")


def on_cpu(*words: str, folder: Path) -> Done:
    """Run the same command on a machine without devices."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FAKE_DEVICES")}
    command = [sys.executable, "-m", "launcher", *words, f"run_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Done(done.stdout, done.stderr, folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Six steps on four devices, followed by the other verbs; a thread writes a checkpoint every two steps."""
    words = (*DEVICE, *KEPT, "checkpoint.async=true", "train.steps=6", BATCH, "steps.predict.batches=1")
    verbs = "steps=[train,evaluate,save,sync_shared,broadcast,predict,merge_strategies,transform,export,inspect]"
    return launched(*words, verbs, folder=tmp_path_factory.mktemp("straight") / "run")


def test_the_accelerator_is_taken_where_there_are_enough_and_the_plan_says_so(tmp_path: Path) -> None:
    done = launched(*TINY, "train.steps=2", folder=tmp_path / "run")
    assert "launch.device auto -> fake: 4 ranks on this machine, torch sees 4 fake\n" in done.out + done.err
    # memory figures come from the device's allocator, not from the process
    assert all(0 < row["memory_mb"] == row["memory_reserved_mb"] < 5 for row in done.rows)


def test_devices_and_backends_that_a_machine_lacks_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for words, text in {
        ("launch.device=npu",): "launch.device = npu: 4 ranks on this machine need a device each, but torch sees 0; "
        "torch's accelerator is fake, of which it sees 4",
        ("launch.device=fake", "launch.nproc=8"): "launch.device = fake: 8 ranks on this machine need a device each, "
        "but torch sees 4",
        ("launch.backend=nccl",): "launch.backend = nccl: the ranks of this run are on fake and need fakeccl",
        ("launch.backend=gloo",): "launch.backend = gloo: the ranks of this run are on fake and need fakeccl",
    }.items():
        assert f"  {text}\n" in launched(*TINY, *words, folder=run, code=2).err
    assert not run.exists()


@pytest.mark.parametrize("asked", ["launch.device=cpu", "launch.nproc=8"], ids=["asked for", "too few devices"])
def test_the_cpu_trains_on_a_machine_with_devices(asked: str, tmp_path: Path) -> None:
    done = launched(*TINY, "train.steps=2", asked, folder=tmp_path / "run")
    if asked == "launch.nproc=8":
        assert "launch.device auto -> cpu: 8 ranks on this machine, torch sees 4 fake\n" in done.out + done.err
    assert len(done.losses) == 2


def test_every_verb_does_its_work(straight: Done) -> None:
    figures, run = straight.figures, straight.folder
    assert all(math.isfinite(loss) for loss in straight.losses)
    assert figures["export_gap"] < 1e-10
    assert (run / "predictions.safetensors").is_file()
    assert (run / "transformed/manifest.json").is_file()
    assert (run / "strategy/merged.json").is_file()


def test_a_run_goes_on_bit_for_bit_on_its_devices(straight: Done, tmp_path: Path) -> None:
    resume = f"checkpoint.resume={straight.folder}/checkpoints/step-000002"
    again = launched(*DEVICE, *KEPT, "train.steps=6", resume, folder=tmp_path / "run")
    assert again.losses == straight.losses[2:]
    assert tensors(again.folder, 6) == tensors(straight.folder, 6)


def test_a_run_goes_on_on_the_cpu_and_back_on_devices_in_another_layout(straight: Done, tmp_path: Path) -> None:
    """Four devices, then two CPU processes in another layout, then two devices in a third layout."""
    checkpoint = f"{straight.folder}/checkpoints/step-000002"
    words = (*TINY, "schedule=constant", *KEPT, "parallel.pipeline.micro_batch_num=2")
    away = on_cpu(
        *words, "train.steps=4", f"checkpoint.resume={checkpoint}", *shape(replicate=2), folder=tmp_path / "away"
    )
    back = f"checkpoint.resume={away.folder}/checkpoints/step-000004"
    home = launched(*words, "launch.device=fake", "train.steps=6", back, *shape(pp=2), folder=tmp_path / "home")
    assert [*away.losses, *home.losses] == pytest.approx(straight.losses[2:], rel=1e-10)


def test_the_same_layout_goes_on_on_the_cpu_and_back(straight: Done, tmp_path: Path) -> None:
    """The CPU's random streams are resumed; the device's has no saved state and begins as in a new run."""
    words = (*TINY, "schedule=constant", *KEPT)
    checkpoint = f"checkpoint.resume={straight.folder}/checkpoints/step-000002"
    away = on_cpu(*words, checkpoint, "train.steps=4", folder=tmp_path / "away")
    there, here = (
        {*read_extra(open_checkpoint(f / "checkpoints/step-000004"), 0)} for f in (straight.folder, away.folder)
    )
    assert "rng.cpu" in here
    assert there - here == {"rng.fake"}
    back = f"checkpoint.resume={away.folder}/checkpoints/step-000004"
    home = launched(*words, "launch.device=fake", "train.steps=6", back, folder=tmp_path / "home")
    assert [*away.losses, *home.losses] == pytest.approx(straight.losses[2:], rel=1e-10)


def test_devices_are_calibrated_with_samples_that_fit_their_memory(tmp_path: Path) -> None:
    """The samples for a device of 16 GB and more are 64 times as large, and need gigabytes."""
    words = ("steps=[calibrate]", "steps.calibrate.seconds=0.1", "steps.calibrate.spread=1e9", "train.steps=1")
    run = tmp_path / "run"
    code, said = fresh(*DEVICE, *words, "launch.nproc=2", "parallel.hsdp=null", folder=run, memory_mb=128)
    assert code == 0, "\n".join(said)
    written = (run / "here.yaml").read_text()
    assert "of 1 node, Fake accelerator, cpu:gloo,fake:fakeccl, torch" in written.replace("\n# ", " ")
    assert re.search(r"^memory_gb: 0\.125\b", written, re.MULTILINE)
    assert "cores_per_node" not in written


def test_a_sample_of_a_finished_run_is_that_of_the_cpu(tmp_path: Path) -> None:
    """``steps=[export,sample]`` of the run trains nothing; ``steps=[sample]`` alone has no model to sample from."""
    text = ("data=text", "data.seq_len=16", "logger=plain", "model=lm_tiny", "model.dim=16", "train.batch_size=16")
    words, run = (*text, "train.steps=2", *shape(pp=2)), tmp_path / "run"
    launched(*words, "launch.device=fake", "steps=[train,save]", folder=run)

    likeliest = ("steps=[export,sample]", "steps.sample.tokens=20", "steps.sample.temperature=0")
    samples = []
    for device in ("fake", "cpu"):
        out = launched(*words, *likeliest, f"launch.device={device}", folder=run).out
        samples.append(out.partition("sample:\n")[2].partition("\ndone in")[0])
    assert len(samples[0]) > 10
    assert samples[0] == samples[1]

    refused = launched(*words, "launch.device=fake", "steps=[sample]", folder=tmp_path / "other", code=2).err
    assert "steps.sample: needs an exported model, but there is no 'export'" in refused


def test_layouts_are_measured_on_devices(tmp_path: Path) -> None:
    words = ("parallel.pipeline.stages=[1,2]", "cluster=here", "launch.nproc=2", "search.measure=2", "search.steps=4")
    done = launched(*DEVICE, *words, "parallel.hsdp=null", "train.steps=2", "steps=[train]", folder=tmp_path / "run")
    assert "search: measuring layout 2 of 2" in done.out + done.err
    assert len(done.losses) == 2


def test_a_killed_rank_is_started_again_and_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    drill = (
        "debug=drill",
        "debug.drill={kill_rank: {rank: 1, step: 3}}",
        "launch.max_restarts=1",
        "checkpoint.every=2",
    )
    done = launched(*DEVICE, *drill, *shape(pp=2), "train.steps=4", folder=tmp_path / "run")
    assert re.search(
        r"bit-identical  yes, all \d+ tensors of weights, optimizer and random streams", done.out + done.err
    )


def test_fp16_finds_its_scale(tmp_path: Path) -> None:
    done = launched(*DEVICE, "train.precision=fp16", "train.steps=3", *shape(pp=2), folder=tmp_path / "run")
    assert all(math.isfinite(loss) for loss in done.losses)
    assert done.rows[-1]["loss_scale"] > 0
