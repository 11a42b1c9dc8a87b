"""``predict`` writes what plain torch computes in one process for the same samples, in order, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.__main__ import main
from launcher.data.open import open_data
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Predict
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import save
from launcher.steps import module
from launcher.steps.inference.output_file import SampleParts, join_parts, part_file, write_part
from launcher.steps.model import build_session, weights_in_one_process
from tests.ranks import DRAWN, on_ranks

COMMON = (
    "recipe=lm_single", "model=lm", "model.dim=16", "model.layers=4", "model.heads=2", "data=random_tokens",
    "data.vocab_size=32", "data.seq_len=4", "data.samples=110", "train.batch_size=8", "launch.nproc=4",
    "train.precision=fp64", "train.steps=2", "steps=[predict]", "steps.predict.to=run:out.safetensors",
)  # fmt: skip
PP2 = "parallel.pipeline={stages: 2, micro_batch_num: 2, scheduler: 1f1b}"
LAYOUTS = {
    "2 stages, each over 2": (PP2, "parallel.hsdp={shard_size: 2, threshold: 0, optimizer_level: level3}"),
    "2 stages, tp 2, output cut": (PP2, "operators=megatron", "parallel.grid.tp=2"),
    "the last stage on the first rank": (
        "parallel.pipeline={stages: 2, micro_batch_num: 2, scheduler: zero_bubble_v}", "launch.nproc=2",
    ),
    "outputs on every stage": (
        "parallel.pipeline={stages: 2, micro_batch_num: 2, output_broadcast: true}", "launch.nproc=2",
    ),
    "over device matrices": (PP2, "parallel.mode=recursive_programming"),
}  # fmt: skip


def predicted(world: World, job: Job, plan: Plan, folder: Path, steps: tuple[Predict, ...]) -> list[str]:
    live = build_session.build(world, job, plan, folder, drawn=DRAWN)
    said = [module(step).run_on_ranks(step, live, job) for step in steps]
    save.save(live, None)
    return said


@torch.no_grad()
def by_plain_torch(job: Job, checkpoint: Path, *inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = weights_in_one_process.from_checkpoint(job, checkpoint).eval()(*inputs)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    job = compose([*COMMON, *LAYOUTS[layout]]).job
    plan = plan_job(job)
    mine = torch.randint(32, (11, 4), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": mine}, tmp_path / "mine.safetensors")
    steps = (
        Predict(to="run:out.safetensors"),
        Predict(to=str(tmp_path / "given.jsonl"), inputs=str(tmp_path / "mine.safetensors")),
        Predict(to="run:short.safetensors", batches=1),
    )
    said = on_ranks(plan.sizes.grid.size, predicted, job, plan, tmp_path, steps)

    checkpoint = tmp_path / "checkpoints/step-000000"
    val = open_data(job.data, seed=job.seed, allow=()).val
    assert len(val) % 8, "the last batch is padded"
    want = by_plain_torch(job, checkpoint, *val.inputs(torch.arange(len(val)).numpy()))
    got = load_file(tmp_path / "out.safetensors")["output"]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert torch.equal(load_file(tmp_path / "short.safetensors")["output"], got[:8])

    lines = [json.loads(line) for line in (tmp_path / "given.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == list(range(11))
    numbers = torch.tensor([line["output"] for line in lines], dtype=torch.float64)
    torch.testing.assert_close(numbers, by_plain_torch(job, checkpoint, mine), rtol=0, atol=1e-12)
    assert said[0][2].startswith(f"{tmp_path}/short.safetensors: 8 samples in ")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoints", "given.jsonl", "mine.safetensors", "out.safetensors", "short.safetensors",
    ]  # fmt: skip


def test_parts_are_joined_in_the_order_of_the_samples(tmp_path: Path) -> None:
    parts = SampleParts(samples=11, parts=3, size=2)  # batches of 6: the second has 5 samples, and its last part has 1
    rows = torch.arange(11, dtype=torch.bfloat16).unsqueeze(1)
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        pieces = [rows[at : at + 2] for at in (2 * part, 6 + 2 * part)]
        write_part(part_file(folder, part), parts.count(part), pieces)
    join_parts(folder, parts, tmp_path / "all.safetensors")
    assert torch.equal(load_file(tmp_path / "all.safetensors")["output"], rows)
    assert not folder.exists()


def test_numbers_that_json_does_not_have_are_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_part(part_file(folder, 0), 2, [torch.tensor([1.0, float("nan")])])
    with pytest.raises(ValueError, match="sample 1") as caught:
        join_parts(folder, SampleParts(2, 1, 2), tmp_path / "all.jsonl")
    assert str(caught.value) == (
        "the output of sample 1 has values that are not finite, which JSON cannot represent; write a .safetensors file"
    )
    assert not (tmp_path / "all.jsonl").exists()


BAD = {
    "no such file": (None, "{path}: No such file or directory"),
    "another kind": ({"x": torch.zeros(3, 4)}, "{path}: x is float32[3, 4], but the model takes int64[4] per sample"),
    "another length": (
        {"x": torch.zeros(3, 5).long()}, "{path}: x is int64[3, 5], but the model takes int64[4] per sample",
    ),
    "too many": (
        {"x": torch.zeros(3, 4).long(), "y": torch.zeros(1)}, "{path}: has x, y, but the model takes 1: input0",
    ),
    "none": ({"x": torch.zeros(0, 4).long()}, "{path}: has no samples"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_inputs_that_are_not_the_models(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, text = BAD[case]
    path = tmp_path / "mine.safetensors"
    if tensors is not None:
        save_file(tensors, path)
    assert main([*COMMON, f"steps.predict.inputs={path}", f"run_dir={tmp_path}/run"]) == 2
    assert f"  steps.predict.inputs: {text.format(path=path)}\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("out.txt", "should be NAME.safetensors or NAME.jsonl, or run:NAME in the run folder"),
        ("run:plan.json", "should be NAME.safetensors or NAME.jsonl, or run:NAME in the run folder"),
        ("run:metrics.jsonl", "the run itself writes metrics.jsonl in its folder; choose another name"),
    ],
)
def test_where_outputs_may_not_go(to: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, f"steps.predict.to={to}", f"run_dir={tmp_path}/run"]) == 2
    assert f"  steps.predict.to = {to}: {text}" in capsys.readouterr().err
