"""Metric services: W&B, MLflow, Trackio, TensorBoard, users' own."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from launcher.checkpoint.tensorfile.watched_folder import make_folder, open_file
from launcher.job import targets
from launcher.job.schema.logger import MLflow, Trackio, Wandb


class OwnLogger:
    """Calls the user's logger; its ``on_start`` and ``close`` are optional."""

    def __init__(self, target: Mapping[str, Any], allow: tuple[str, ...], key: str) -> None:
        self._logger: Any = targets.build(target, allow, object, key=f"{key}._target_")

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        if hasattr(self._logger, "on_start"):
            self._logger.on_start(config, plan, folder)

    def log(self, row: dict[str, Any]) -> None:
        self._logger.log(row)

    def close(self, how: str) -> None:
        if hasattr(self._logger, "close"):
            self._logger.close()


LEFT_OUT = ("step", "steps")


def tag(key: str) -> str:
    """Returns the name that a metric has in a logger.

    >>> tag("loss"), tag("val_loss"), tag("val_accuracy_ema")
    ('train/loss', 'val/loss', 'val/accuracy_ema')
    """
    return f"val/{key.removeprefix('val_')}" if key.startswith("val_") else f"train/{key}"


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row by their names in a logger.

    >>> figures({"step": 3, "steps": 9, "loss": 1.5, "val_loss": None})
    {'train/loss': 1.5}
    """
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in LEFT_OUT}
    return {tag(key): float(value) for key, value in numbers.items()}


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns settings by dotted key; an empty group is a value.

    >>> flat({"model": {"name": "lm", "lora": None}, "steps": {}})
    {'model.name': 'lm', 'model.lora': None, 'steps': {}}
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        values |= flat(value, name) if isinstance(value, Mapping) and value else {name: value}
    return values


class WandbLogger:
    """Logs to Weights & Biases.

    ``state``: stored in the run folder; contains the id, with which a resumed run continues.
    """

    def __init__(self, settings: Wandb, title: str, state: dict[str, Any]) -> None:
        self._settings, self._title, self._state = settings, title, state

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        import wandb

        settings, known = self._settings, "id" in self._state
        self._state.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=settings.project,
            name=settings.name or self._title,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            id=self._state["id"],
            resume="allow",
            dir=str(folder / "loggers"),
            config=None if known else config,
            # W&B would record this process, which does not train
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        if not known:
            path = Path(self._run.dir, "plan.txt")
            path.write_text(plan, encoding="utf-8")
            self._run.save(str(path), base_path=self._run.dir, policy="now")

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(figures(row), step=int(row["step"]))

    def close(self, how: str) -> None:
        self._run.finish(exit_code=int(how != "done"))


MOST_PARAMS = 100
"""The most parameters per request to a server."""
ENDS = {"done": "FINISHED", "failed": "FAILED"}
LONGEST_PARAM = 500  # characters of a parameter that all versions accept


def local(uri: str) -> bool:
    """Returns true if a URI of MLflow names a place on this machine.

    >>> local("file:///a/b"), local("/a/b"), local("sqlite:///a.db"), local("http://h:5000"), local("s3://a")
    (True, True, True, False, False)
    """
    return urlsplit(uri).scheme.lower().partition("+")[0] in ("", "file", "sqlite")


class MLflowLogger:
    """Logs to MLflow.

    ``state``: stored in the run folder; contains the run id, with which a resumed run continues.
    """

    def __init__(self, settings: MLflow, title: str, state: dict[str, Any]) -> None:
        self._settings, self._title, self._state = settings, title, state

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["GIT_PYTHON_REFRESH"] = "quiet"
        from mlflow.tracking import MlflowClient

        store = folder.resolve() / "loggers"
        settings, uri = self._settings, self._settings.tracking_uri
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{store / 'mlflow.db'}")
        if "run_id" in self._state:
            self._client.update_run(self._state["run_id"], status="RUNNING")
            return

        artifacts = None if uri else (store / "mlflow").as_uri()
        experiment = self._client.get_experiment_by_name(settings.experiment)
        where = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(settings.experiment, artifacts)
        )
        made = self._client.create_run(where, run_name=settings.name or self._title)
        self._state["run_id"] = made.info.run_id
        self._log_settings(config, plan, local(made.info.artifact_uri) and not local(uri or ""))

    def _log_settings(self, config: dict[str, Any], plan: str, elsewhere: bool) -> None:
        """Logs the settings and the plan.

        ``elsewhere``: a server asks for files in a folder of this machine. They are not written: it could
        name any folder.
        """
        from mlflow.entities import Param

        run = self._state["run_id"]
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat(config).items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run, params=params[first : first + MOST_PARAMS])
        if elsewhere:
            print(
                "config.yaml and plan.txt are not logged: the server names a folder of this machine for them"
            )
            return
        self._client.log_text(run, yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "config.yaml")
        self._client.log_text(run, plan, "plan.txt")

    def log(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = time.time_ns() // 1_000_000, int(row["step"])
        metrics = [Metric(key, value, now, step) for key, value in figures(row).items()]
        self._client.log_batch(self._state["run_id"], metrics=metrics)

    def close(self, how: str) -> None:
        self._client.set_terminated(self._state["run_id"], ENDS.get(how, "KILLED"))


class TrackioLogger:
    """Logs to Trackio.

    ``state``: stored in the run folder; contains the name, with which a resumed run continues.
    """

    def __init__(self, settings: Trackio, title: str, state: dict[str, Any]) -> None:
        self._settings, self._title, self._state = settings, title, state

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(self._settings.dir or folder.resolve() / "loggers" / "trackio")
        for sends in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(sends, None)  # the request decides where metrics go
        import trackio

        known = "name" in self._state
        self._state.setdefault("name", self._settings.name or self._title)
        self._run = trackio.init(
            project=self._settings.project,
            name=self._state["name"],
            space_id=self._settings.space_id,
            config=config,  # Trackio keeps the config of the last start
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,  # training uses the GPUs, not this process
            auto_log_cpu=False,
        )
        if not known:
            self._run.log({"plan": trackio.Markdown(f"```\n{plan}\n```")}, step=0)

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(figures(row), step=int(row["step"]))

    def close(self, how: str) -> None:
        self._run.finish()


FOLDER = "tensorboard"
VERSION = "brain.Event:2"
"""The version of the file format, with which a file must begin."""


class TensorBoard:
    """Writes metrics as event files of TensorBoard.

    ``before``: rows of earlier starts; they and the ``texts``, by title, are written if the folder is new.
    Each start writes a new file. A repeated step replaces its earlier values and those of all later steps.
    """

    def __init__(self, run: Path, before: Iterable[Mapping[str, Any]], texts: Mapping[str, str]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run / FOLDER
        known = folder.is_dir() and any(folder.iterdir())
        make_folder(folder)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(open_file(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        self._step = max((int(row["step"]) for row in before), default=0)
        self._event(file_version=VERSION)
        if known:
            self._again(self._step + 1)
        for row in () if known else before:
            self._scalars(row)
        for title, text in () if known else texts.items():
            self._text(title, text)

    def feed(self, row: Mapping[str, Any]) -> None:
        if "loss" in row and int(row["step"]) <= self._step:
            self._again(int(row["step"]))
        self._scalars(row)
        self._step = max(self._step, int(row["step"]))
        self._records.flush()

    def close(self) -> None:
        self._file.close()

    def _scalars(self, row: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures(row).items()]
        self._event(step=int(row["step"]), summary=Summary(value=values))

    def _text(self, title: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._event(step=0, summary=text_pb(title, f"```\n{text}\n```"))

    def _again(self, step: int) -> None:
        """Tells readers to skip the values already written for ``step`` and later steps."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._event(step=step, session_log=SessionLog(status=SessionLog.START))

    def _event(self, **parts: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **parts).SerializeToString())
