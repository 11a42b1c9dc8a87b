"""Writes TensorBoard files in ``tensorboard/`` of the run folder; starts none of its threads."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.run.report.loggers.metric_names import figures

FOLDER = "tensorboard"
VERSION = "brain.Event:2"
"""The version of the file format, with which a file must begin."""


class TensorBoard:
    """Takes every row of the metrics; ``before``: those of earlier starts, ``texts``: by title.

    Each start writes a new file. A repeated step replaces its earlier values and those of all later steps.
    """

    def __init__(self, run: Path, before: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run / FOLDER
        known = folder.is_dir() and any(folder.iterdir())
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
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
        """Tells readers to skip earlier values of this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._event(step=step, session_log=SessionLog(status=SessionLog.START))

    def _event(self, **parts: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **parts).SerializeToString())
