"""The Weights & Biases logger: files in ``loggers/wandb``, sent by ``wandb sync`` or immediately."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from launcher.job.schema.loggers import Wandb
from launcher.run.report.loggers.metric_names import figures


class WandbLogger:
    """``state``: stored in the run folder; contains the id, with which a resumed run continues."""

    def __init__(self, asked: Wandb, title: str, state: dict[str, Any]) -> None:
        self._asked, self._title, self._state = asked, title, state

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None:
        import wandb

        asked, known = self._asked, "id" in self._state
        self._state.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=asked.project,
            name=asked.name or self._title,
            entity=asked.entity,
            group=asked.group,
            tags=asked.tags,
            mode=asked.mode,
            id=self._state["id"],
            resume="allow",
            dir=str(folder / "loggers"),
            config=None if known else config,
            # this process has no console output or training to record
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
