"""The value that a wrong one means, as an override to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.job import intended_value
from launcher.job.overrides import paste
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.redact import hidden

_NONE = object()  # None may itself be the intended value


def value(parts: tuple[str, ...], bad: Any, data: Any) -> str:
    """Returns ``key=value`` with the first reading of ``bad`` that the schema accepts, or ""."""
    key = ".".join(parts)
    note = schema_keys.at(parts, data)
    if hidden(key, bad) or note is None:
        return ""
    if tokenizer := _tokenizer_file(parts, bad, data):
        return tokenizer
    good = next(intended_value.readings(key, note, bad), _NONE)
    return "" if good is _NONE else paste(key, good)


def _tokenizer_file(parts: tuple[str, ...], bad: Any, data: Any) -> str:
    """Returns the overrides for a tokenizer that is named by its file, or by its folder; "" otherwise."""
    sibling = (*parts[:-1], "tokenizer_file")
    if parts[-1] != "tokenizer" or not isinstance(bad, str) or schema_keys.at(sibling, data) is None:
        return ""
    file = bad if bad.endswith(".json") else str(Path(bad, "tokenizer.json"))
    if "/" not in bad and file != bad and not Path(file).is_file():
        return ""
    return f"{paste('.'.join(parts), 'file')} {paste('.'.join(sibling), file)}"


WITHOUT_GUESS = ("tokenizer",)
"""Keys whose words are never corrected, because another word would change the training data."""


def group(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> str:
    """Returns ``key={...}`` with the first change to ``bad`` that the schema accepts; "" if it accepts none.

    It first sorts lists of numbers and removes duplicates; then it tries the other words that a key accepts.
    """
    note = schema_keys.at(parts, data)
    for good in (_sorted_lists(bad), *_other_words(parts, bad, data)):
        if schema_keys.accepts(note, good):
            return paste(".".join(parts), good) if good else ""
    return ""


def _sorted_lists(bad: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [k for k, v in bad.items() if isinstance(v, list) and {*map(type, v)} == {int}]
    return {**bad, **{k: sorted(set(bad[k])) for k in numbers}}


def _other_words(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> Iterator[dict[str, Any]]:
    """Yields ``bad`` with another word at one of its keys, if several of its keys are set."""
    keys = [k for k, v in bad.items() if v is not None]
    for k in keys if len(keys) > 1 else ():
        if k in WITHOUT_GUESS:
            continue
        for word in schema_keys.literals(schema_keys.at((*parts, k), data)):
            yield {**bad, k: word}
