"""A job that is written as a recipe and read again is the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.job.compose import compose
from launcher.job.config_folders import ConfigFiles
from launcher.run import frozen_request


@pytest.mark.parametrize("recipe", ConfigFiles().options("recipe"))
def test_every_recipe_comes_back(recipe: str, tmp_path: Path) -> None:
    job = compose([f"recipe={recipe}"]).job
    file = tmp_path / "mine.yaml"
    file.write_text(frozen_request.recipe_text(job, ("What this is.",)))
    again = compose([f"recipe={file}"]).job
    assert again.model_copy(update={"recipe": job.recipe}) == job
