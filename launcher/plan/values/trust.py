"""Who must vouch for a checkpoint: where its key is, and whether one without a key is believed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.job.schema import redact
from launcher.job.schema.job import Job

PLACE = re.compile(r"(env):([A-Za-z_][A-Za-z0-9_]*)|(file):(.+)")
"""Where a key is: an environment variable, or a file."""


def told(place: str) -> str:
    """Where a key is, for people; without what may be the key itself."""
    return redact.shown(place)


@dataclass(frozen=True)
class Trust:
    """Who must vouch for a checkpoint that is read: whoever has the key at ``key``.

    ``None``: the place of the key that the checkpoint itself names is believed, and so is one that is not
    encrypted. ``plain``: one that is not encrypted is believed although there is a ``key``.
    """

    key: str | None = None
    plain: bool = False


ANYONE = Trust()


def trust(job: Job) -> Trust:
    """As ``checkpoint.encrypt`` and ``checkpoint.accept_plain`` say."""
    return Trust(job.checkpoint.encrypt, job.checkpoint.accept_plain)
