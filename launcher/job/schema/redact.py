"""Hides secrets; a value is secret if its key says so."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_WORDS = "token|key|keys|password|passwd|passphrase|secret|secrets|credential|credentials|encrypt"
# matches a whole word of the name (api_key, hf-token) or its end (apikey),
# but neither data.tokenizer nor steps.sample.tokens
_SECRET = re.compile(rf"(?:(?:^|[^a-z])(?:{_WORDS})(?:$|[^a-z])|(?:token|key|password|secret)$)")
_RESEMBLED = ("encrypt", "encryption", "password", "passphrase", "credential")
"""Words for secrets whose misspellings are recognized: no other setting has a similar name."""

_PAIR = re.compile(r"""(['"]?)([\w.-]+)\1(\s*[:=]\s*)(?=\S)(.*)""", re.DOTALL)


@lru_cache(maxsize=4096)
def secret(key: str) -> bool:
    """Return true if any part of a dotted key names a secret, or resembles a name of one.

    >>> [secret(key) for key in ("logger.api_key", "hub.token", "encrpytt")]
    [True, True, True]
    >>> [secret(key) for key in ("data.tokenizer", "steps.sample.tokens")]
    [False, False]
    """
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in key.split(".")]
    return any(_SECRET.search(part) or _nearly(part) for part in parts)


def _nearly(part: str) -> bool:
    return any(_misspelled(word) for word in re.split(r"[^a-z]+", part) if len(word) > 3)


@lru_cache(maxsize=4096)
def _misspelled(word: str) -> bool:
    """Return true if ``word`` resembles a word for a secret. Cached: a comparison takes 0.1 ms."""
    return bool(get_close_matches(word, _RESEMBLED, 1, 0.75))


_PLACE = re.compile(r"""['"]?(env|file):([^'"]*?)['"]?\s*$""")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,47}")
_WORD = re.compile(r"[a-z_-]{1,16}", re.IGNORECASE)
_KEY = re.compile(r"(?<![\w+/-])(?:[0-9A-Fa-f]{64}|[\w+/-]{43}=)(?![\w+/=-])", re.ASCII)
"""32 bytes in hexadecimal or base64, the form of an AES-256 key."""
_DIGEST = re.compile(r"sha|digest|hash|revision|commit|checksum")


def place(text: str) -> bool:
    """Return true if ``text`` tells where a secret is stored, and is not a secret itself.

    A name that may itself be the secret is treated as one.

    >>> [place(text) for text in ("env:MY_KEY", "file:keys/run.key")]
    [True, True]
    >>> [place(text) for text in ("env:hunter2", f"env:{'A5' * 32}", f"file:{'5a' * 32}")]
    [False, False, False]
    """
    match = _PLACE.match(text)
    if match is None or _KEY.search(match[2]):
        return False
    if match[1] == "env":
        name = match[2]
        return _VARIABLE.fullmatch(name) is not None and not (len(name) >= 32 and "_" not in name)
    return "/" in match[2] or "." in match[2] or _WORD.fullmatch(match[2]) is not None


def shown(text: str) -> str:
    """The place of a secret, with anything that may be the secret itself hidden.

    >>> shown("env:MY_KEY"), shown("env:hunter2")
    ('env:MY_KEY', 'env:***')
    """
    return text if place(text) else f"{text.partition(':')[0]}:{HIDDEN}"


_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")


def addresses(text: str) -> str:
    """``text`` with users and passwords in URLs hidden.

    >>> addresses("see http://me:hunter2@host:5000/a")
    'see http://***@host:5000/a'
    """
    return _USER.sub(HIDDEN, text)


def values(data: Any, key: str = "") -> Any:
    """A copy of plain data in which every secret value is ``***``."""
    if isinstance(data, dict):
        return {k: values(v, f"{key}.{k}" if key else str(k)) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [values(v, key) for v in data]
    if data is not None and secret(key) and not place(str(data)):
        return HIDDEN
    return addresses(data) if isinstance(data, str) else data


def text(line: str) -> str:
    """A line of YAML or an override, truncated at the first key that names a secret.

    Also hides anything that looks like an encryption key, unless the line calls it a digest.

    >>> text("model={lr: 1, api_key: abc, dim: 2}")
    'model={lr: 1, api_key: ***'
    """
    at, line = 0, addresses(line)
    while pair := _PAIR.search(line, at):
        value = pair[4].partition(" #")[0].strip()
        if secret(pair[2]) and value not in ("null", "~", "") and not place(value):
            return line[: pair.start(4)] + HIDDEN
        at = pair.start(4)
    return line if _DIGEST.search(line) else _KEY.sub(HIDDEN, line)


SHORTEST = 5  # characters; shorter words occur in too much other text to be hidden
_TOKEN = re.compile(r"""([^\s=:,{}\[\]()'"$]+)(\s*[=:])?""")
_NO_VALUE = {"env", "file", "oc.env", "null", "none", "true", "false"}


def typed(words: Sequence[str]) -> frozenset[str]:
    """The secrets on a command line: words after the name of a secret, and what looks like an encryption key.

    >>> sorted(typed(["checkpoint={encryptt: hunter2}", "hub.token", "=", "abcde", "seed=1"]))
    ['abcde', 'hunter2']
    """
    secrets: set[str] = set()
    behind = False
    for word in words:
        fresh, behind = _values(word, behind)
        secrets |= {*fresh, *(() if _DIGEST.search(word) else _KEY.findall(word))}
    return frozenset(v for v in secrets if len(v) >= SHORTEST and v.lower() not in _NO_VALUE)


def _values(word: str, behind: bool) -> tuple[list[str], bool]:
    """The secrets in ``word``, and whether the next word may contain the value of a secret.

    ``behind``: true if ``word`` may contain the value of a secret that the previous word names.
    """
    values: list[str] = []
    before = ""
    for token, joint in _TOKEN.findall(word):
        if (joint.strip() == "=" and re.fullmatch(r"[-+~]*[a-z_.]+", token)) or not behind:
            behind = secret(token)
        elif not place(f"{before.lower()}:{token}"):
            values.append(token)
        before = token
    return values, behind and not [v for v in values if v.lower() not in _NO_VALUE]


def hide(text: str, secrets: Collection[str]) -> str:
    """``text`` with ``secrets`` hidden, ignoring case."""
    for value in sorted(secrets, key=len, reverse=True):
        text = re.sub(re.escape(value), HIDDEN, text, flags=re.IGNORECASE)
    return text
