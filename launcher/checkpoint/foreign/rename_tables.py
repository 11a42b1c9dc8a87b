"""Tables that map between our models' tensor names and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from launcher.checkpoint.foreign.rename import Table

NameTable = Literal["llama"] | Mapping[str, str | None] | None

FROM_LLAMA: Table = {
    "model.embed_tokens": "embed",
    r"^model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)": r"layers.\1.attn.\2.\3",
    r"^model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(.+)": r"layers.\1.mlp.\2.\3",
    r"^model\.layers\.(\d+)\.input_layernorm\.(.+)": r"layers.\1.attn_norm.\2",
    r"^model\.layers\.(\d+)\.post_attention_layernorm\.(.+)": r"layers.\1.mlp_norm.\2",
    r"^model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": None,  # in old folders; our model computes it
    "model.norm": "norm",
    "lm_head": "head",
}
TO_LLAMA: Table = {
    "embed": "model.embed_tokens",
    r"^layers\.(\d+)\.attn\.([qkvo])\.(.+)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"^layers\.(\d+)\.mlp\.(gate|up|down)\.(.+)": r"model.layers.\1.mlp.\2_proj.\3",
    r"^layers\.(\d+)\.attn_norm\.(.+)": r"model.layers.\1.input_layernorm.\2",
    r"^layers\.(\d+)\.mlp_norm\.(.+)": r"model.layers.\1.post_attention_layernorm.\2",
    "norm": "model.norm",
    "head": "lm_head",
}


def to_ours(names: NameTable) -> Table | None:
    """Returns the table that ``names`` selects, from another program's names to ours."""
    return FROM_LLAMA if names == "llama" else names


def from_ours(names: NameTable) -> Table | None:
    return TO_LLAMA if names == "llama" else names
