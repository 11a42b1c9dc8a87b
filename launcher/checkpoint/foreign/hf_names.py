"""Names of tensors in folders of transformers that are not the names its models have today."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

RENAMED = {"embed_out.weight": "lm_head.weight"}
"""GPT-NeoX; what transformers renames when it reads such a folder."""
WRITTEN: Mapping[str, Mapping[str, str]] = {"gpt_neox": {"lm_head": "embed_out", "": ""}}
"""Tables for ``renamed``, by ``model_type``: the names that every version of transformers reads."""
COMPUTED = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")
"""Masks and angles that older versions saved: a model makes its own, and no weight is called so."""


def given(theirs: Collection[str], ours: Collection[str]) -> dict[str, str]:
    """The names in a folder by those of the model; ``ours``: all that it has.

    A folder of a base model, as of GPT-2, is without the prefix that it has in one with a head.
    """
    known = {*ours}
    prefixes = sorted({n.partition(".")[0] for n in known})
    out: dict[str, str] = {}
    for name in theirs:
        may = (name, RENAMED.get(name, name), *(f"{prefix}.{name}" for prefix in prefixes))
        found = next((n for n in may if n in known and (n == name or n not in theirs)), None)
        if found is not None:
            out[found] = name
    return out


def written(model_type: object, theirs: Collection[str]) -> Mapping[str, str] | None:
    """Of the model's names into those of a folder that had ``theirs``; ``None``: as they are."""
    table = WRITTEN.get(str(model_type))
    as_they_are = any(name in theirs for name in RENAMED.values())
    return None if as_they_are else table


def unknown(theirs: Collection[str], found: Mapping[str, str]) -> list[str]:
    """Those that the model has no place for."""
    used = {*found.values()}
    return [n for n in theirs if n not in used and not COMPUTED.search(n)]
