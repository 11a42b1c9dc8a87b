"""Tiny models of transformers: ids in, logits out."""

from __future__ import annotations

from typing import Any

import transformers as t
from torch import Tensor, nn

from tests.parity.zoo.case import D, image, odd

IDS = {"inputs": (("int64", 6),), "target": (6,), "needs": "transformers"}


class _Logits(nn.Module):
    """A minimal adapter."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.m, self.options = model, options

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.m(input_ids=ids, return_dict=False, **self.options)[0]
        return out


@odd(**IDS)
class Gpt2(_Logits):
    """GPT-2."""

    def __init__(self) -> None:
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = t.GPT2Config(vocab_size=8, n_embd=D, n_layer=4, n_head=2, n_positions=8, **quiet)
        super().__init__(t.GPT2LMHeadModel(config), use_cache=False)


@odd(**IDS)
class Llama(_Logits):
    """Llama with a tied head and grouped queries."""

    def __init__(self) -> None:
        config = t.LlamaConfig(
            vocab_size=8, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=16, tie_word_embeddings=True, pad_token_id=None, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        super().__init__(t.LlamaForCausalLM(config), use_cache=False)


@odd(**IDS)
class LlamaCached(_Logits):
    """Llama with its default settings: with a cache of keys and values."""

    def __init__(self) -> None:
        config = t.LlamaConfig(
            vocab_size=8, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=16, pad_token_id=None, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        super().__init__(t.LlamaForCausalLM(config))


@odd(**IDS)
class Bert(_Logits):
    """BERT with its head for masked language modeling."""

    def __init__(self) -> None:
        config = t.BertConfig(
            vocab_size=8, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8, pad_token_id=None,
        )  # fmt: skip
        super().__init__(t.BertForMaskedLM(config))


@odd(**IDS)
class T5(nn.Module):
    """T5: an encoder and a decoder, whose blocks share the first one's relative positions."""

    def __init__(self) -> None:
        super().__init__()
        config = t.T5Config(
            vocab_size=8, d_model=D, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, relative_attention_num_buckets=4, relative_attention_max_distance=8,
        )  # fmt: skip
        self.m = t.T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.m(input_ids=ids, decoder_input_ids=ids.flip(-1), use_cache=False, return_dict=False)[0]
        return out


@image(needs="transformers")
class Vit(nn.Module):
    """A vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        config = t.ViTConfig(
            hidden_size=D, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
            num_channels=3, num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.m = t.ViTForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.m(pixel_values=x, return_dict=False)[0]
        return out


@odd(**IDS)
class Mixtral(_Logits):
    """A mixture of experts: two of four per token."""

    def __init__(self) -> None:
        config = t.MixtralConfig(
            vocab_size=8, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None, bos_token_id=0,
            eos_token_id=0, experts_implementation="eager",
        )  # fmt: skip
        super().__init__(t.MixtralForCausalLM(config), use_cache=False)


@odd(**IDS)
class GptNeoX(_Logits):
    """GPT-NeoX: attention and MLP in parallel."""

    def __init__(self) -> None:
        config = t.GPTNeoXConfig(
            vocab_size=8, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        super().__init__(t.GPTNeoXForCausalLM(config), use_cache=False)


@odd(**IDS)
class Qwen3(_Logits):
    """Qwen 3: norms on queries and keys."""

    def __init__(self) -> None:
        config = t.Qwen3Config(
            vocab_size=8, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=16, head_dim=4, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        super().__init__(t.Qwen3ForCausalLM(config), use_cache=False)


@odd(
    inputs=(("int64", 8),), target=(8,), classes=10, needs="transformers", rounds=1e-6
)  # float32 logits: sums of a power of two are exact
class Mamba(_Logits):
    """A state space model."""

    def __init__(self) -> None:
        config = t.MambaConfig(
            vocab_size=10, hidden_size=D, num_hidden_layers=2, state_size=4, bos_token_id=0, eos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
        super().__init__(t.MambaForCausalLM(config), use_cache=False)
