"""Reads what loggers kept of a run with their own packages: ``python -m tests.run.read_back NAME RUN``.

It is a program because Trackio looks for its folder when it is imported.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Scalars = dict[str, list[tuple[int, float]]]


def read(name: str, run: Path) -> list[dict[str, Any]]:
    """Return each run that was logged: its name, id, config and plan, and (step, value) by tag in order of arrival."""
    words = [sys.executable, "-m", "tests.run.read_back", name, str(run)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def wandb(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of wandb; an offline run that was started several times has one file per start, with one id."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((run / "loggers" / "wandb").glob("offline-run-*/*.wandb")):
        scalars: Scalars = defaultdict(list)
        for record in _records(file.read_bytes()):
            if record.HasField("run"):
                one = found.setdefault(record.run.run_id, {"config": {}, "scalars": scalars, "plan": []})
                one |= {"name": record.run.display_name, "project": record.run.project, "id": record.run.run_id}
                one["config"] |= {u.key: json.loads(u.value_json) for u in record.run.config.update if u.key[0] != "_"}
                scalars = one["scalars"]
            if record.HasField("files"):
                plans = [file.parent / "files" / f.path for f in record.files.files if f.path == "plan.txt"]
                one["plan"] += [plan.read_text() for plan in plans]
            for item in record.history.item if record.HasField("history") else ():
                key = item.key or ".".join(item.nested_key)
                if key[0] != "_":
                    scalars[key].append((record.history.step.num, json.loads(item.value_json)))
    yield from found.values()


def _records(data: bytes) -> Iterator[Any]:
    """Yield the records of a file in the format of LevelDB's log.

    It has blocks of 32 KB; a record has one or several pieces, each after 7 bytes of header.
    """
    from wandb.proto import wandb_internal_pb2

    at, piece = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        piece += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only piece, or the last one
            yield wandb_internal_pb2.Record.FromString(piece)
            piece = b""


def mlflow(run: Path) -> Iterator[dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'loggers' / 'mlflow.db'}")
    for experiment in client.search_experiments():
        for one in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
            place = Path(client.download_artifacts(one.info.run_id, ""))
            yield {
                "name": one.info.run_name,
                "project": experiment.name,
                "id": one.info.run_id,
                "status": one.info.status,
                "config": one.data.params,
                "plan": [(place / "plan.txt").read_text()],
                "scalars": {
                    key: [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, key)]
                    for key in one.data.metrics
                },
            }


def trackio(run: Path) -> Iterator[dict[str, Any]]:
    os.environ["TRACKIO_DIR"] = str(run / "loggers" / "trackio")
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    for project in SQLiteStorage.get_projects():
        for one in Api().runs(project):
            scalars: Scalars = defaultdict(list)
            plan = []
            for row in SQLiteStorage.get_logs(project, one.name, run_id=one.id):
                for key, value in row.items():
                    if isinstance(value, float):
                        scalars[key].append((row["step"], value))
                plan += [row["plan"]["_value"]] if "plan" in row else []
            yield {
                "name": one.name, "project": project, "id": one.id,
                "config": one.config, "plan": plan, "scalars": scalars,
            }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps([*{"wandb": wandb, "mlflow": mlflow, "trackio": trackio}[sys.argv[1]](Path(sys.argv[2]))]))
