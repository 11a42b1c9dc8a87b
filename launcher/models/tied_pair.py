"""The smallest model with a shared table: a vocabulary embedding and a head."""

from __future__ import annotations

from torch import Tensor, nn

from launcher.job.schema.components import TiedPair
from launcher.models.init import Embedding, Linear


class EmbeddingAndHead(nn.Module):
    """Tokens (batch, time) -> logits (batch, time, vocabulary): a bigram model."""

    def __init__(self, settings: TiedPair) -> None:
        super().__init__()
        assert settings.vocab_size is not None
        self.embed = Embedding(settings.vocab_size, settings.dim)
        self.head = Linear(settings.dim, settings.vocab_size)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits
