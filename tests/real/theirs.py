"""Unmodified models of transformers: ids in, logits out."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


class _Logits(nn.Module):
    """A minimal adapter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.m = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.m(input_ids=ids, use_cache=False, return_dict=False)[0]


class Gpt2(_Logits):
    def __init__(self) -> None:
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        super().__init__(GPT2LMHeadModel(GPT2Config(
            vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=16, **quiet)))  # fmt: skip


class Llama(_Logits):
    def __init__(self) -> None:
        super().__init__(LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, tie_word_embeddings=True)))  # fmt: skip
