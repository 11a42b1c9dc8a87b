"""Hiding secrets: a value is one when its key says so."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_WORDS = "token|key|keys|password|passwd|passphrase|secret|secrets|credential|credentials|encrypt"
# a whole word of the name (api_key, hf-token), or its end (apikey); not data.tokenizer, not steps.sample.tokens
_SECRET = re.compile(rf"(?:(?:^|[^a-z])(?:{_WORDS})(?:$|[^a-z])|(?:token|key|password|secret)$)")
_PAIR = re.compile(r"""(['"]?)([\w.-]+)\1(\s*[:=]\s*)(?=\S)(.*)""", re.DOTALL)


def secret(key: str) -> bool:
    """Whether any part of a dotted key names a secret.

    >>> [secret(k) for k in ("logger.api_key", "hub.token", "data.tokenizer", "steps.sample.tokens")]
    [True, True, False, False]
    """
    return any(_SECRET.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower()) for part in key.split("."))


_PLACE = re.compile(r"""['"]?(env:[A-Za-z_][A-Za-z0-9_]*|file:[^\s,}]+)['"]?\s*$""")
"""Where a secret is, which is none itself."""


def values(data: Any, key: str = "") -> Any:
    """A copy of plain data in which every secret that is set reads ``***``."""
    if isinstance(data, dict):
        return {k: values(v, f"{key}.{k}" if key else str(k)) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [values(v, key) for v in data]
    return HIDDEN if data is not None and secret(key) and not _PLACE.match(str(data)) else data


def text(line: str) -> str:
    """A line of YAML or an override as typed, cut off after the first key that names a secret.

    >>> text("model={lr: 1, api_key: abc, dim: 2}")
    'model={lr: 1, api_key: ***'
    """
    at = 0
    while pair := _PAIR.search(line, at):
        if secret(pair[2]) and pair[4].strip() not in ("null", "~", "") and not _PLACE.match(pair[4].strip()):
            return line[: pair.start(4)] + HIDDEN
        at = pair.start(4)
    return line
