"""Hides secrets; a value is secret if its key says so.

Two requests are compared by ``identity`` or ``identified``, which have a digest where a value is hidden: two
different secrets must never look like the same request.
"""

from __future__ import annotations

import hashlib
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
_SPECIAL = re.compile(r"(?:bos|eos|pad|mask|unk|sep|cls|image|audio|video)_token(?:s|_ids?)?")
"""Special tokens of a vocabulary."""
_MODULES = ("parallel.pipeline.stage_config.", "parallel.operators.", "optim.groups.")
"""Sections whose keys are names of modules or parameters, such as ``attn.query_key_value``."""
_PASSWORDS = _WORDS.removeprefix("token|key|keys|")
_PASSWORD = re.compile(rf"(?:(?:^|[^a-z])(?:{_PASSWORDS})(?:$|[^a-z])|(?:password|secret)$)")
"""Names of secrets that may be short numbers. A number at a token or key is an index or a count."""
_NUMBER = r"[-+]?\d{1,9}(?:\.\d{0,9})?(?:e[-+]?\d{1,3})?"
_NUMBERS = rf"\s*{_NUMBER}(?:\s*,\s*{_NUMBER})*\s*"
_PLAIN = re.compile(
    rf"(?:true|false|{_NUMBERS}|(?:choice|range|interval)\({_NUMBERS}\)|\[{_NUMBERS}\])"
    r"""(?=\s*(?:$|[}\]]|,\s*['"]?[\w.-]+['"]?\s*[:=]))""",
    re.IGNORECASE,
)
"""Booleans, and numbers of at most 9 digits, up to the next key or the end."""
_RESEMBLED = ("encrypt", "encryption", "password", "passphrase", "credential")
"""Words for secrets whose misspellings are recognized: no other setting has a similar name."""

_PAIR = re.compile(r"""(['"]?)([\w.-]+)\1(\s*[:=]\s*)(?=\S)(.*)""", re.DOTALL)


@lru_cache(maxsize=4096)
def secret(key: str) -> bool:
    """Returns true if any part of a dotted key names a secret, or resembles a name of one.

    >>> [secret(key) for key in ("logger.api_key", "hub.token", "encrpytt")]
    [True, True, True]
    >>> [secret(key) for key in ("data.tokenizer", "steps.sample.tokens", "data.mask_token")]
    [False, False, False]
    """
    if key.startswith(_MODULES):
        return False
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in key.split(".")]
    return any((_SECRET.search(part) and not _SPECIAL.fullmatch(part)) or _nearly(part) for part in parts)


def hidden(key: str, value: Any) -> bool:
    """Returns true if ``value`` is a secret.

    Not secret are the place of a secret, a boolean, and a number of at most 9 digits at a token or key.

    >>> hidden("model.num_key_value_heads", 2), hidden("hub.token", "abc"), hidden("db.password", 1234)
    (False, True, True)
    """
    if value is None or isinstance(value, bool) or not secret(key) or place(str(value)):
        return False
    return not isinstance(value, int | float) or _may_be_number(key) or not re.fullmatch(_NUMBER, str(value))


@lru_cache(maxsize=4096)
def _may_be_number(key: str) -> bool:
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in key.split(".")]
    return any(_PASSWORD.search(part) or _nearly(part) for part in parts)


def _nearly(part: str) -> bool:
    return any(_misspelled(word) for word in re.split(r"[^a-z]+", part) if len(word) > 3)


@lru_cache(maxsize=4096)
def _misspelled(word: str) -> bool:
    """Returns true if ``word`` resembles a word for a secret. Cached: a comparison takes 0.1 ms."""
    return bool(get_close_matches(word, _RESEMBLED, 1, 0.75))


_PLACE = re.compile(r"""['"]?(env|file):([^'"]*?)['"]?\s*$""")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,47}")
_WORD = re.compile(r"[a-z_-]{1,16}", re.IGNORECASE)
_KEY = re.compile(r"(?<![\w+/-])(?:[0-9A-Fa-f]{64}|[\w+/-]{43}=)(?![\w+/=-])", re.ASCII)
"""32 bytes in hexadecimal or base64, the form of an AES-256 key."""
_DIGEST = re.compile(r"sha|digest|hash|revision|commit|checksum")


def place(text: str) -> bool:
    """Returns true if ``text`` tells where a secret is stored, and is not a secret itself.

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
    """Returns the place of a secret, with anything that may be the secret itself hidden.

    >>> shown("env:MY_KEY"), shown("env:hunter2")
    ('env:MY_KEY', 'env:***')
    """
    return text if place(text) else f"{text.partition(':')[0]}:{HIDDEN}"


_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")


def addresses(text: str) -> str:
    """Returns ``text`` with users and passwords in URLs hidden.

    >>> addresses("see http://me:hunter2@host:5000/a")
    'see http://***@host:5000/a'
    """
    return _USER.sub(HIDDEN, text)


def values(data: Any, key: str = "") -> Any:
    """Returns a copy of plain data in which every secret value is ``***``."""
    if isinstance(data, dict):
        return {k: values(v, f"{key}.{k}" if key else str(k)) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [values(v, key) for v in data]
    if hidden(key, data):
        return HIDDEN
    return addresses(data) if isinstance(data, str) else data


@lru_cache(maxsize=1024)
def digest(secret: str) -> str:
    """Returns ``***`` and a digest of ``secret``, which takes 0.05 s: secrets cannot be guessed fast."""
    return HIDDEN + hashlib.pbkdf2_hmac("sha256", secret.encode(), b"launcher", 100_000, 8).hex()


_DIGESTED = re.compile(r"\*\*\*[0-9a-f]{16}(?![0-9a-f])")


def without_digests(text: str) -> str:
    """Returns ``text`` as people see it."""
    return _DIGESTED.sub(HIDDEN, text)


def identified(data: Any, key: str = "") -> Any:
    """Returns a copy of plain data that is equal for equal data only.

    Every secret is replaced by its digest.
    """
    if isinstance(data, dict):
        return {k: identified(v, f"{key}.{k}" if key else str(k)) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [identified(v, key) for v in data]
    if hidden(key, data):
        return digest(str(data))
    return _USER.sub(lambda user: digest(user[0]), data) if isinstance(data, str) else data


def identity(line: str) -> str:
    """Returns an override as ``text`` shows it; if that hides anything, a digest of all of it follows."""
    shown = text(line)
    return shown if shown == line else shown.removesuffix(HIDDEN) + digest(line)


def same(recorded: Any, value: Any) -> bool:
    """Returns true if ``recorded`` is ``value``, both as ``identified`` returns them.

    Older versions recorded ``***`` without a digest: such a value cannot be compared, and is no difference.
    """
    if isinstance(recorded, dict) and isinstance(value, dict):
        return recorded.keys() == value.keys() and all(same(v, value[k]) for k, v in recorded.items())
    if isinstance(recorded, list) and isinstance(value, list):
        return len(recorded) == len(value) and all(map(same, recorded, value))
    if recorded == HIDDEN and value is not None:
        return True
    if isinstance(recorded, str) and isinstance(value, str) and not _DIGESTED.search(recorded):
        return recorded == without_digests(value)
    return bool(recorded == value) and isinstance(recorded, bool) == isinstance(value, bool)


def text(line: str) -> str:
    """Returns a line of YAML or an override, truncated at the first key that names a secret.

    Also hides anything that looks like an encryption key, unless the line calls it a digest.

    >>> text("model={lr: 1, api_key: abc, dim: 2}")
    'model={lr: 1, api_key: ***'
    """
    at, line = 0, addresses(line)
    named_by_module = line.lstrip("+~ ").startswith(_MODULES)
    while not named_by_module and (pair := _PAIR.search(line, at)):
        value = pair[4].partition(" #")[0].strip()
        plain = _PLAIN.match(value) and not _may_be_number(pair[2])
        if secret(pair[2]) and value not in ("null", "~", "") and not place(value) and not plain:
            return line[: pair.start(4)] + HIDDEN
        at = pair.start(4)
    return line if _DIGEST.search(line) else _KEY.sub(HIDDEN, line)


SHORTEST = 5  # characters; shorter words occur in too much other text to be hidden
_TOKEN = re.compile(r"""([^\s=:,{}\[\]()'"$]+)(\s*[=:])?""")
_NO_VALUE = {"env", "file", "oc.env", "null", "none", "true", "false", "choice", "range", "interval"}


def typed(words: Sequence[str]) -> frozenset[str]:
    """Returns the secrets on a command line.

    These are words after the name of a secret, and what looks like an encryption key.

    >>> sorted(typed(["checkpoint={encryptt: hunter2}", "hub.token", "=", "abcde", "seed=1"]))
    ['abcde', 'hunter2']
    """
    secrets: set[str] = set()
    behind = ""
    for word in words:
        fresh, behind = _values(word, behind)
        secrets |= {*fresh, *(() if _DIGEST.search(word) else _KEY.findall(word))}
    return frozenset(v for v in secrets if len(v) >= SHORTEST and v.lower() not in _NO_VALUE)


def _values(word: str, behind: str) -> tuple[list[str], str]:
    """Returns the secrets in ``word``, and the name of a secret whose value may be in the next word.

    ``behind``: the name of a secret whose value may be in ``word``.
    """
    values: list[str] = []
    before, counted = "", False
    for token, joint in _TOKEN.findall(word):
        named = joint.strip() == "=" and re.fullmatch(r"[-+~]*[a-z_.]+", token)
        if named or not behind or (counted and joint.strip()):
            behind = token if secret(token) else ""
            counted = False
        elif not place(f"{before.lower()}:{token}"):
            counted = re.fullmatch(_NUMBER, token) is not None and not _may_be_number(behind)
            values += [] if counted else [token]
        before = token
    done = counted or any(v.lower() not in _NO_VALUE for v in values)
    return values, "" if done else behind


def hide(text: str, secrets: Collection[str]) -> str:
    """Returns ``text`` with ``secrets`` hidden, ignoring case."""
    for value in sorted(secrets, key=len, reverse=True):
        text = re.sub(re.escape(value), HIDDEN, text, flags=re.IGNORECASE)
    return text
