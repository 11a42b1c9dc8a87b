"""The MLflow logger: a SQLite file in ``loggers`` of the run folder, or a server."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import yaml

from launcher.job.schema.loggers import MLflow
from launcher.run.report.loggers.metric_names import figures, flat

MOST = 100
"""The most parameters per request to a server."""
ENDS = {"done": "FINISHED", "failed": "FAILED"}
LONGEST = 500  # characters of a parameter that all versions accept


class MLflowLogger:
    """``state``: stored in the run folder; contains the run id, with which a resumed run continues."""

    def __init__(self, asked: MLflow, title: str, state: dict[str, Any]) -> None:
        self._asked, self._title, self._state = asked, title, state

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["GIT_PYTHON_REFRESH"] = "quiet"
        from mlflow.tracking import MlflowClient

        store = folder.resolve() / "loggers"
        asked, uri = self._asked, self._asked.tracking_uri
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{store / 'mlflow.db'}")
        if "run_id" in self._state:
            self._client.update_run(self._state["run_id"], status="RUNNING")
            return

        artifacts = None if uri else (store / "mlflow").as_uri()
        found = self._client.get_experiment_by_name(asked.experiment)
        where = found.experiment_id if found else self._client.create_experiment(asked.experiment, artifacts)
        made = self._client.create_run(where, run_name=asked.name or self._title)
        self._state["run_id"] = made.info.run_id
        self._settle(config, plan)

    def _settle(self, config: dict[str, Any], plan: str) -> None:
        from mlflow.entities import Param

        run = self._state["run_id"]
        params = [Param(key, str(value)[:LONGEST]) for key, value in flat(config).items()]
        for first in range(0, len(params), MOST):
            self._client.log_batch(run, params=params[first : first + MOST])
        self._client.log_text(run, yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "config.yaml")
        self._client.log_text(run, plan, "plan.txt")

    def log(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = time.time_ns() // 1_000_000, int(row["step"])
        metrics = [Metric(key, value, now, step) for key, value in figures(row).items()]
        self._client.log_batch(self._state["run_id"], metrics=metrics)

    def close(self, how: str) -> None:
        self._client.set_terminated(self._state["run_id"], ENDS.get(how, "KILLED"))
