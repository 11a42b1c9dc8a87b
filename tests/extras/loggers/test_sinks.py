"""A tracking server chooses no folder of this machine, in which files would be written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.extras.loggers.sinks import MLflowLogger
from launcher.job.schema.logger import MLflow


@pytest.mark.parametrize(
    ("server", "artifacts", "written"),
    [
        ("http://h:5000", "mlflow-artifacts:/0/a", True),
        ("http://h:5000", "s3://bucket/a", True),
        ("http://h:5000", "file:///home/me", False),
        ("http://h:5000", "FILE:/home/me", False),
        ("http://h:5000", "/home/me", False),
        ("postgresql+psycopg2://h/db", "/home/me", False),
        ("sqlite:///a.db", "/home/me/mlruns", True),
        (None, "file:///run/loggers/mlflow", True),
    ],
)
def test_files_are_logged_unless_a_server_names_a_folder_here(server, artifacts, written, monkeypatch, capsys):
    texts: list[str] = []

    class Client:
        def __init__(self, **_: Any) -> None: ...
        def get_experiment_by_name(self, _: str) -> Any:
            return SimpleNamespace(experiment_id="0")

        def create_run(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id="1", artifact_uri=artifacts))

        def log_batch(self, *_: Any, **__: Any) -> None: ...
        def log_text(self, _: str, text: str, file: str) -> None:
            texts.append(file)

    for name, content in (("tracking", {"MlflowClient": Client}), ("entities", {"Param": SimpleNamespace})):
        module = ModuleType(f"mlflow.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    logger = MLflowLogger(MLflow(tracking_uri=server, experiment="x"), "t", {})
    logger.on_start({}, "plan", Path("run"))
    assert texts == (["config.yaml", "plan.txt"] if written else [])
    assert ("names a folder of this machine" in capsys.readouterr().out) is not written
