"""The policy of checkpoint keys: where the key is, and whether an unencrypted checkpoint is accepted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.job.schema import redact
from launcher.job.schema.job import Job

PLACE = re.compile(r"(env):([A-Za-z_][A-Za-z0-9_]*)|(file):(.+)")
"""The place of a key: an environment variable, or a file."""


def place_text(place: str) -> str:
    """Describes the place of a key, without anything that may be the key itself."""
    return redact.shown(place)


@dataclass(frozen=True)
class Trust:
    """A checkpoint is trusted if it was written with the key at the place ``key``.

    With ``key=None``, the place that the checkpoint itself names is used, and an unencrypted checkpoint is
    accepted. ``plain``: an unencrypted checkpoint is accepted although there is a ``key``.
    """

    key: str | None = None
    plain: bool = False


ANYONE = Trust()


def trust(job: Job) -> Trust:
    """Returns the trust that ``checkpoint.encrypt`` and ``checkpoint.accept_plain`` request."""
    return Trust(job.checkpoint.encrypt, job.checkpoint.accept_plain)
