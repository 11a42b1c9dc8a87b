"""A transformers model on devices: certified over two stages, trained, and exported with a check of its logits."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fake_accelerator.on_devices.processes import apart, launched
from tests.real.test_families import SPREAD, typed


def weights(folder: Path) -> Path:
    from tests.real.families import weighed

    return weighed("llama", folder)


def test_a_model_folder_is_certified_trained_and_exported(tmp_path: Path) -> None:
    folder, run = apart(weights, tmp_path / "llama"), tmp_path / "run"
    words = [word for word in typed(folder, run, *SPREAD, "launch.device=fake") if not word.startswith("run_dir=")]
    steps = ("steps=[certify,train,save,export]", "train.steps=2")
    done = launched(*words, *steps, folder=run)
    assert json.loads((run / "certificate.json").read_text())["holds"]
    assert len(done.losses) == 2
    assert (run / "exports/hf/config.json").is_file()
