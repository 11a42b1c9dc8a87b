from __future__ import annotations

import pytest

from launcher.checkpoint.strange import strange
from launcher.checkpoint.strategy import Entry, Strategy
from launcher.plan.grid import Grid
from launcher.plan.layout import Layout

WHOLE = Entry(Layout(Grid(()), (), ()), "float32")
TABLE = Entry(Layout(Grid(()), (), ()), "float32", "param", ("head.weight",))
MODEL = Strategy(Grid(()), {"embed.weight": TABLE, **{f"layers.{k}.attn_norm.weight": WHOLE for k in range(8)}})
LLAMA = ["model.embed_tokens.weight", *(f"model.layers.{k}.input_layernorm.weight" for k in range(8))]
NORMS = [f"layers.{k}.attn_norm.weight" for k in range(8)]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["head.weight", *NORMS], ""),
        (["head.weight", "embed.weight", *NORMS], ""),
        (
            LLAMA,
            "the model has no place for model.embed_tokens.weight, model.layers.0.input_layernorm.weight, "
            "model.layers.1.input_layernorm.weight, model.layers.2.input_layernorm.weight, "
            "model.layers.3.input_layernorm.weight, model.layers.4.input_layernorm.weight and 3 more; "
            "nothing is there for the model's embed.weight, layers.0.attn_norm.weight, layers.1.attn_norm.weight, "
            "layers.2.attn_norm.weight, layers.3.attn_norm.weight, layers.4.attn_norm.weight and 3 more; "
            "these are a Llama's names as transformers has them: names: llama",
        ),
        (
            ["wte.weight", *NORMS],
            "the model has no place for wte.weight; nothing is there for the model's embed.weight; "
            "names is a table {theirs: ours} that brings them together",
        ),
        (
            ["embed.weight", *NORMS[:-1]],
            "nothing is there for the model's layers.7.attn_norm.weight; "
            "the sizes of the model must be those of the source",
        ),
        (
            ["embed.weight", *NORMS, "bias"],
            "the model has no place for bias; leave them out with null in the table names, or all with strict: false",
        ),
    ],
    ids=["another name of a tie", "both names of a tie", "a Llama", "a name unlike ours", "too few", "too many"],
)
def test_names_that_do_not_fit_come_with_the_way_out(names: list[str], text: str) -> None:
    assert strange(names, MODEL) == text
