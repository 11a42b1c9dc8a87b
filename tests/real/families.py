"""Tiny model families of transformers: the content of a folder for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "mistral": GROUPED | {"head_dim": 8},
    "mixtral": GROUPED | {"num_local_experts": 4},
    "phi3": GROUPED | {"pad_token_id": 0},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": GROUPED | {"head_dim": 8, "sliding_window": 8},
    "olmo2": GROUPED,
    "gpt_neox": SMALL,
    "gpt2": {
        "vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "opt": {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 48,
        "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0,
    },
    "bert": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True},
}  # fmt: skip
MOE = GROUPED | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": MOE | {"head_dim": 8},
    "olmoe": MOE,
    "deepseek_v3": SMALL | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "qk_nope_head_dim": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 28,
        "patch_size": 7,
        "num_channels": 1,
        "num_labels": 10,
    },
}


def described(family: str, folder: Path) -> Path:
    """A folder that has only a ``config.json``."""
    AutoConfig.for_model(family, **(DECODERS | OTHERS)[family]).save_pretrained(folder)
    return folder


def weighed(family: str, folder: Path) -> Path:
    """A folder with weights, as transformers initializes and saves them."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(DECODERS | EXPERTS)[family])
    config.experts_implementation = "eager"  # torch's grouped matmul does not support such small experts
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
