"""An override to paste that makes a bad value good."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from launcher.job import surface
from launcher.job.inside import RUN
from launcher.job.near import nearest
from launcher.job.origins import Origins
from launcher.job.overrides import paste, shell
from launcher.job.redact import HIDDEN, secret


def value(parts: tuple[str, ...], bad: Any, origins: Origins, data: Any, bound: Any = None) -> str:
    """``key=value`` with the first that the schema accepts: what was meant, what was set before, the bound it
    crossed, the default; ``key=VALUE`` to fill in when none is."""
    key = ".".join(parts)
    note = surface.at(parts, data)
    if secret(key):
        return f"{key}={HIDDEN}"
    if note is not None:
        for good in _candidates(parts, bad, origins, data, bound):
            if good is not None and (good, type(good)) != (bad, type(bad)) and surface.accepts(note, good):
                return paste(key, good)
    if note is None or not surface.settings(note, bad):
        return f"{key}=VALUE"
    field = surface.field_at(parts, data)
    if field is None or field.is_required() or isinstance(bad, Mapping):
        return ""
    return f"{key}=null" if field.default is None else shell(f"~{key}")


def group(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> str:
    """``key={...}``: the first that the schema accepts of ``bad`` with its lists in order, each number once, and
    ``bad`` with another word at a key that takes words; "" when it accepts none."""
    ordered = {k: sorted(set(v)) if isinstance(v, list) and {*map(type, v)} == {int} else v for k, v in bad.items()}
    words = ({**bad, k: word} for k in bad for word in surface.literals(surface.at((*parts, k), data)))
    note = surface.at(parts, data)
    good = next((g for g in (ordered, *words) if surface.accepts(note, g)), None)
    return paste(".".join(parts), good) if good else ""


def _candidates(parts: tuple[str, ...], bad: Any, origins: Origins, data: Any, bound: Any) -> Iterator[Any]:
    yield from _meant(bad)
    words = surface.literals(surface.at(parts, data))
    yield nearest(bad, [str(w) for w in words])
    for place in reversed(origins.all(".".join(parts))[:-1]):
        if place.value and "${" not in place.value:
            yield yaml.safe_load(place.value)
    yield bound
    field = surface.field_at(parts, data)
    if field is not None and not field.is_required() and not isinstance(field.default, BaseModel):
        yield field.get_default(call_default_factory=True, validated_data={})
    yield from words
    yield from (8, 0.1)  # a number to start from


def _meant(bad: Any) -> Iterator[Any]:
    """The same value in another type: 1000.0 as 1000, '8' as 8, 8 as '8', a as [a]."""
    if isinstance(bad, float) and bad.is_integer():
        yield int(bad)
    if isinstance(bad, str) and bad.strip():
        read = yaml.safe_load(bad) if bad.replace(".", "").replace("-", "").isalnum() else None
        yield read if isinstance(read, int | float | bool) else None
        if bad.startswith(RUN):
            name = "/".join(part for p in bad.removeprefix(RUN).split("/") if (part := p.lstrip(".")))
            yield from (f"{RUN}{name}", f"{RUN}mine/{name}", f"/path/to/{name}")
        yield re.sub(r"[^A-Za-z0-9._-]+", "-", bad).strip("-.")
        yield from (f"{above}{re.sub(r'[.][^./]*$', '', bad)}.json" for above in ("", "/path/to/"))  # of a file
    if isinstance(bad, int | float) and not isinstance(bad, bool):
        yield str(bad)
    if isinstance(bad, str) and bad:
        yield [bad]
