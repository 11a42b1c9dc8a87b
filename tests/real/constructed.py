"""Small configurations of transformers' architectures: each class by name, with the settings of its config."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn

V = {"vocab_size": 64}
S = V | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
G = S | {"num_key_value_heads": 2}
N = V | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
SEEN = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
PAIRED = V | {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "qk_nope_head_dim": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip

CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": N,
    "LlamaForCausalLM": G,
    "MixtralForCausalLM": G | {"num_local_experts": 4},
    "MambaForCausalLM": V | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Mamba2ForCausalLM": V | {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "OPTForCausalLM": V | {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32,
        "max_position_embeddings": 32},
    "GPTNeoXForCausalLM": S,
    "FalconForCausalLM": V | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "BloomForCausalLM": V | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Qwen2ForCausalLM": G,
    "Qwen3ForCausalLM": G | {"head_dim": 8},
    "Qwen3MoeForCausalLM": G | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    "GemmaForCausalLM": G | {"head_dim": 8},
    "Gemma2ForCausalLM": G | {"head_dim": 8},
    "PhiForCausalLM": S,
    "Phi3ForCausalLM": G | {"pad_token_id": 0},
    "MistralForCausalLM": G,
    "GPTJForCausalLM": N | {"rotary_dim": 4},
    "GPTBigCodeForCausalLM": N,
    "DeepseekV3ForCausalLM": G | LATENT,
    "GptOssForCausalLM": G | {"head_dim": 8, "num_local_experts": 4},
    "RwkvForCausalLM": V | {"hidden_size": 32, "num_hidden_layers": 2},
    "JambaForCausalLM": G | {"num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": S,
    "RobertaForMaskedLM": S,
    "ElectraForMaskedLM": S | {"embedding_size": 16},
    "DistilBertForMaskedLM": V | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "AlbertForMaskedLM": S | {"embedding_size": 16},
    "DebertaV2ForMaskedLM": S,
    "T5ForConditionalGeneration": V | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "BartForConditionalGeneration": PAIRED,
    "WhisperForConditionalGeneration": PAIRED,
    "ViTForImageClassification": SEEN,
    "BeitForImageClassification": SEEN,
    "CLIPModel": {
        "text_config": V | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        "vision_config": SEEN},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "SwinForImageClassification": {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "Wav2Vec2ForCTC": S | {
        "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}  # fmt: skip


def build(name: str) -> nn.Module:
    model = getattr(transformers, name)
    made = model(model.config_class(**(CAUSAL | OTHERS)[name]))
    assert isinstance(made, nn.Module)
    return made


class Lm(nn.Module):
    """A user's own module around one of transformers, and a layer that checks its device."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.m = build(name)
        self.m.config.use_cache = False
        self.own = nn.Linear(64, 64, bias=False)
        if not self.own.weight.is_meta:
            nn.init.eye_(self.own.weight)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.own(self.m(input_ids=ids, return_dict=False)[0])
        return out
