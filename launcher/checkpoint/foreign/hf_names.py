"""Maps tensor names in folders of older transformers versions to the names that its models have today."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

RENAMED = {"embed_out.weight": "lm_head.weight"}
"""Names that transformers changes when it reads a folder; this one is from GPT-NeoX."""
WRITTEN: Mapping[str, Mapping[str, str]] = {"gpt_neox": {"lm_head": "embed_out", "": ""}}
"""Tables for ``renamed``, by ``model_type``: the names that every version of transformers reads."""
COMPUTED = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")
"""Masks and rotary frequencies that older versions saved: models compute these, and no weight is named so."""


def given(theirs: Collection[str], ours: Collection[str]) -> dict[str, str]:
    """Maps the model's names to those in a folder. ``ours`` are all names of the model.

    The folder of a base model, GPT-2's for example, lacks the prefix that names have in a model with a head.
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
    """Returns the table from the model's names to those of a folder that had ``theirs``.

    ``None`` means that the names stay as they are.
    """
    table = WRITTEN.get(str(model_type))
    as_they_are = any(name in theirs for name in RENAMED.values())
    return None if as_they_are else table


def unknown(theirs: Collection[str], found: Mapping[str, str]) -> list[str]:
    """Returns the names in a folder that the model has no place for."""
    used = {*found.values()}
    return [n for n in theirs if n not in used and not COMPUTED.search(n)]
