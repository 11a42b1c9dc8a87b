"""Which name was meant: the nearest valid one, and the key that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.job.cures.synonyms import OTHERS, UNLIKE
from launcher.job.schema import schema_keys
from launcher.job.schema.similar_names import nearest


def choice(word: object, names: Sequence[str], title: str) -> str:
    """``did you mean`` and the list of what there is."""
    hint = nearest(word, names)
    return (f", did you mean {hint!r}?" if hint else "") + f" ({title}: {', '.join(names)})"


def key(parts: Sequence[str], bad: int, data: Any) -> str | None:
    """A valid key instead of ``parts``, whose part ``bad`` is unknown: a similar name, what other programs call it,
    else the same leaf elsewhere; ``None`` where several would do. Without ``data`` all keys that there can be count."""
    leaf = parts[-1].lower().replace("-", "_")
    if bad == len(parts) - 1 and leaf in UNLIKE:
        return None
    valid = dict.fromkeys(
        k for k in schema_keys.everywhere() if not data or schema_keys.at(k.split("."), data) is not None
    )
    above = ".".join(parts[:bad])
    beside = [k.rpartition(".")[2] for k in valid if k.rpartition(".")[0] == above]
    if other := next((k for k, names in OTHERS.items() if leaf in names and k in valid), None):
        return other
    similar = nearest(parts[bad], beside)
    if similar and (meant := ".".join((*parts[:bad], similar, *parts[bad + 1 :]))) in valid:
        return meant
    if same_leaf := [k for k in valid if k.rpartition(".")[2] == leaf]:
        return same_leaf[0] if len(same_leaf) == 1 else _of(parts, same_leaf)
    near = nearest(leaf, {k.rpartition(".")[2] for k in valid}, 0.75)
    alike = [k for k in valid if k.rpartition(".")[2] == near]
    return alike[0] if len(alike) == 1 else _of(parts, alike)


def _of(parts: Sequence[str], keys: Sequence[str]) -> str | None:
    """The one of ``keys`` that what stands above tells; of a bare name the least deep, if that is one alone."""
    if len(parts) > 1:
        return nearest(".".join(parts), keys)
    least = min((k.count(".") for k in keys), default=0)
    high = [k for k in keys if k.count(".") == least]
    return high[0] if len(high) == 1 else None


def why_not(name: str) -> str:
    """Why there is no key of this name, of those that other programs have; "" of others."""
    return UNLIKE.get(name.lower().replace("-", "_"), "")
