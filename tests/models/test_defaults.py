"""What ``null`` means in a model's settings."""

from __future__ import annotations

from launcher.job.schema.models import LanguageModel
from launcher.models.defaults import resolve


def lm(**changes):
    sizes = {"name": "lm", "vocab_size": 17, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    return LanguageModel(**sizes | changes)


def test_defaults_are_worked_out_once_with_a_note_each():
    settings, notes = resolve(LanguageModel(name="lm", vocab_size=256))
    assert (settings.kv_heads, settings.ffn_dim) == (4, 384)
    assert notes == (
        "model.kv_heads null -> 4: one for each of model.heads",
        "model.ffn_dim null -> 384: 8/3 of model.dim, rounded up to a multiple of 64",
    )
    assert resolve(settings) == (settings, ())
