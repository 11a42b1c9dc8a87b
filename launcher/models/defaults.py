"""Resolves the defaults of a model's settings: the values that ``null`` stands for."""

from __future__ import annotations

from launcher.job.schema.components import Model
from launcher.job.schema.models import LanguageModel

MULTIPLE = 64


def resolve(settings: Model) -> tuple[Model, tuple[str, ...]]:
    """Returns the settings without ``None``, plus a note for each resolved default.

    >>> resolve(LanguageModel(name="lm", vocab_size=256, dim=128, kv_heads=2))[1]
    ('model.ffn_dim null -> 384: 8/3 of model.dim, rounded up to a multiple of 64',)
    """
    if not isinstance(settings, LanguageModel):
        return settings, ()

    resolved: dict[str, int] = {}
    notes = []
    if settings.kv_heads is None:
        resolved["kv_heads"] = settings.heads
        notes.append(f"model.kv_heads null -> {settings.heads}: one for each of model.heads")
    if settings.ffn_dim is None:
        resolved["ffn_dim"] = width = -(-8 * settings.dim // (3 * MULTIPLE)) * MULTIPLE
        why = f"8/3 of model.dim, rounded up to a multiple of {MULTIPLE}"
        notes.append(f"model.ffn_dim null -> {width}: {why}")
    return settings.model_copy(update=resolved), tuple(notes)
