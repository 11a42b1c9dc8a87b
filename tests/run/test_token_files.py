"""Real runs on token files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.__main__ import main
from launcher.data.tokens.formats import TokenWriter
from tests.data.token_bytes import little
from tests.run.launching import losses, metrics, shape, tensors

TOKENS = (
    "recipe=lm_single", "model=lm_tiny", "data=tokens", "data.seq_len=16", "train.batch_size=8", "logger=plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two token files, of which the recipe's model learns, and one of nanoGPT."""
    home = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for name, n in (("web.tokens", 5000), ("books.tokens", 2000)):
        with TokenWriter(home / name, 300) as file:
            file.append(rng.integers(0, 300, n))
    (home / "raw.bin").write_bytes(little("H", rng.integers(0, 300, 3000).tolist()))
    return home


def test_two_steps_of_the_recipe_on_one_file(files: Path, tmp_path: Path) -> None:
    words = (f"data.path={files}/web.tokens", "steps=[train,evaluate]", "train.steps=2", f"run_dir={tmp_path}/run")
    assert main([*TOKENS, *words]) == 0
    assert losses(tmp_path / "run") == pytest.approx([np.log(300)] * 2, rel=0.05)
    assert "val_loss" in metrics(tmp_path / "run")[-1]


def test_a_run_that_goes_on_in_another_layout_reads_the_samples_that_follow(files: Path, tmp_path: Path) -> None:
    """One rank trains on a mixture for four steps.

    Another run trains for two steps, and is then resumed on one rank and on two ranks.
    """
    sources = f"data.sources=[{{path: {files}/web.tokens, weight: 0.7}}, {{path: {files}/books.tokens, weight: 0.3}}]"
    words = (*TOKENS, sources, "steps=[train,save]", "optim=sgd", "schedule=constant", "train.precision=fp64")
    assert main([*words, "train.steps=4", f"run_dir={tmp_path}/straight"]) == 0
    assert main([*words, "train.steps=2", f"run_dir={tmp_path}/first"]) == 0
    resume = f"checkpoint.resume={tmp_path}/first/checkpoints/step-000002"
    assert main([*words, "train.steps=4", f"run_dir={tmp_path}/again", resume]) == 0
    assert tensors(tmp_path / "again", 4) == tensors(tmp_path / "straight", 4)
    assert main([*words, "train.steps=4", f"run_dir={tmp_path}/two", resume, *shape(shard=2)]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "straight")[2:], rel=1e-12)


def test_a_token_without_a_row_is_named_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(little("H", [7] * 999 + [300] + [7] * 1000))
    words = (f"data.path={path}", "data.vocab_size=300", "data.val_fraction=0", "steps=[train]", "train.steps=40")
    assert main([*TOKENS, *words, f"run_dir={tmp_path}/run"]) == 2
    said = capfd.readouterr().err
    assert f"data.vocab_size = 300: token 999 of {path} is 300" in said
    assert not (tmp_path / "run").exists()


def test_evaluation_of_held_out_files_needs_no_share(files: Path, tmp_path: Path) -> None:
    words = (f"data.path={files}/web.tokens", f"data.val={files}/raw.bin", "data.vocab_size=300", "data.val_fraction=0")
    asked = (*words, "steps=[train,evaluate]", "train.steps=1", f"run_dir={tmp_path}/run")
    assert main([*TOKENS, *asked]) == 0
    assert "val_loss" in metrics(tmp_path / "run")[-1]


def test_packed_documents_go_on_in_another_layout(tmp_path: Path) -> None:
    """Documents are packed and masked.

    They are trained on two stages for four steps; on one rank for two, and then resumed on two stages.
    """
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path / "a.tokens", 300, end_of_document=0) as file:
        for n in rng.integers(1, 40, 300).tolist():
            file.append([*rng.integers(1, 300, n).tolist(), 0])
    packed = (f"data.path={tmp_path}/a.tokens", "data.packing=best_fit", "data.document_mask=true")
    words = (*TOKENS, *packed, "optim=sgd", "schedule=constant", "train.precision=fp64")
    two = ("launch.nproc=2", "parallel.pipeline.stages=2")
    assert main([*words, *two, "steps=[train,evaluate]", "train.steps=4", f"run_dir={tmp_path}/straight"]) == 0
    assert main([*words, "steps=[train,save]", "train.steps=2", f"run_dir={tmp_path}/first"]) == 0
    resume = f"checkpoint.resume={tmp_path}/first/checkpoints/step-000002"
    assert main([*words, *two, "steps=[train,evaluate]", "train.steps=4", f"run_dir={tmp_path}/again", resume]) == 0
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "straight")[2:], rel=1e-12)
    held = [metrics(tmp_path / name)[-1]["val_loss"] for name in ("again", "straight")]
    assert held[0] == pytest.approx(held[1], rel=1e-12)
