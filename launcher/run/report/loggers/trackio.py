"""The Trackio logger: SQLite files in ``loggers/trackio`` of the run folder, or a Hugging Face Space."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launcher.job.schema.loggers import Trackio
from launcher.run.report.loggers.metric_names import figures


class TrackioLogger:
    """``state``: stored in the run folder; contains the name, with which a resumed run continues."""

    def __init__(self, asked: Trackio, title: str, state: dict[str, Any]) -> None:
        self._asked, self._title, self._state = asked, title, state

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(self._asked.dir or folder.resolve() / "loggers" / "trackio")
        for sends in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(sends, None)  # the request decides where metrics go
        import trackio

        known = "name" in self._state
        self._state.setdefault("name", self._asked.name or self._title)
        self._run = trackio.init(
            project=self._asked.project,
            name=self._state["name"],
            space_id=self._asked.space_id,
            config=config,  # Trackio keeps that of the last start
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,  # training's GPU use, not this process's
            auto_log_cpu=False,
        )
        if not known:
            self._run.log({"plan": trackio.Markdown(f"```\n{plan}\n```")}, step=0)

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(figures(row), step=int(row["step"]))

    def close(self, how: str) -> None:
        self._run.finish()
