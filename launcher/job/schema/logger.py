"""Settings of loggers, which show or store the metrics of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from launcher.job.schema.base import Flag, Number, Settings, Switch
from launcher.job.schema.paths import FilePath
from launcher.job.schema.user_class import Target

Name = Annotated[str, Field(min_length=1)]


class Wandb(Settings):
    """Weights & Biases; ``offline`` writes files that ``wandb sync`` sends."""

    project: Name | None = Field(None, description="null: the run's name")
    name: Name | None = Field(None, description="of the run in it; null: the run's name and number")
    entity: Name | None = Field(None, description="user or team; null: the logged-in user")
    group: Name | None = None
    tags: tuple[Name, ...] = ()
    mode: Literal["offline", "online"] = "offline"


class MLflow(Settings):
    """MLflow; ``tracking_uri`` null: a SQLite file in the run folder."""

    experiment: Name | None = Field(None, description="null: the run's name")
    name: Name | None = Field(None, description="of the run in it; null: the run's name and number")
    tracking_uri: Name | None = None

    @field_validator("tracking_uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "a user and password would be written to the run folder; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class Trackio(Settings):
    """Trackio; ``space_id`` null: nothing leaves this machine."""

    project: Name | None = Field(None, description="null: the run's name")
    name: Name | None = Field(None, description="of the run in it; null: the run's name and number")
    dir: Annotated[FilePath, Field(min_length=1)] | None = Field(
        None, description="folder of its files; null: in the run folder"
    )
    space_id: Name | None = Field(None, description="a Space of Hugging Face, as user/name")


class Logger(Settings):
    """Loggers. ``jsonl`` is always on; ``progress: auto`` draws a bar on a terminal, otherwise plain lines.

    ``wait_s``: seconds that the end of a run waits for loggers to send what is left.
    """

    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    csv: Flag = False
    tensorboard: Flag = False
    wandb: Annotated[Wandb | None, Switch] = None
    mlflow: Annotated[MLflow | None, Switch] = None
    trackio: Annotated[Trackio | None, Switch] = None
    others: tuple[Target, ...] = ()
    wait_s: Number = Field(30.0, ge=0, le=600)

    @property
    def services(self) -> bool:
        """Returns true if any logger is on besides the launcher's own files and progress lines."""
        return any((self.tensorboard, self.wandb, self.mlflow, self.trackio, self.others))
