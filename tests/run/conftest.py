"""A run that several test files read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.launching import BATCH, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on four ranks, which evaluates, saves and exports a Hugging Face folder of several shards."""
    home = tmp_path_factory.mktemp("trained")
    (home / "config.json").write_text('{"model_type": "llama"}\n')
    return run(
        home / "run", "steps=[train,evaluate,save,export]", BATCH, "steps.export.format=hf", "steps.export.names=llama",
        "steps.export.max_shard_size=4KB", f"steps.export.beside=[{home / 'config.json'}]", steps=2,
    )  # fmt: skip
