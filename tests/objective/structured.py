"""Models that return several tensors, and losses that take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Named(NamedTuple):
    logits: Tensor
    value: Tensor


class Heads(nn.Module):
    """A trunk of layers and two heads: one returns logits, the other a number per token.

    ``kind``: the container of both outputs.
    """

    positionwise = True

    def __init__(self, kind: str, vocab: int = 64, dim: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(layers)
        )
        self.head, self.value = nn.Linear(dim, vocab), nn.Linear(dim, 1)

    def forward(self, tokens: Tensor) -> Any:
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)
        logits, value = self.head(h), self.value(h).squeeze(-1)
        if self.kind == "dict":
            return {"value": value, "logits": logits}
        if self.kind == "named":
            return Named(logits, value)
        return [logits, value] if self.kind == "list" else (logits, value)


class CombinedLoss:
    """The cross entropy of the logits, plus the squared distance of the value from the scaled target."""

    def parts(self, output: Any) -> tuple[Tensor, Tensor]:
        if isinstance(output, dict):
            assert list(output)[:2] in (["value", "logits"], ["early", "tokens"])
            return output["logits"], output["value"]
        assert type(output) is tuple
        return output[0], output[1]

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = self.parts(output)
        each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="none")
        far = (value.flatten() - target.flatten() / 64) ** 2
        return torch.where(target.flatten() != -100, each + 0.3 * far, 0).sum(), self.count(target)

    def count(self, target: Tensor) -> Tensor:
        return (target != -100).sum()


class ValueDistance(CombinedLoss):
    """The distance of the values from the scaled targets."""

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        _, value = self.parts(output)
        return torch.where(target != -100, (value - target / 64).abs(), 0).sum(), self.count(target)


class NestedOutput(Heads):
    """Returns a nested dict, which is neither a tuple nor a dict of tensors."""

    def forward(self, tokens: Tensor) -> Any:
        logits, value = super().forward(tokens)
        return {"logits": logits, "inner": {"value": value}}


class LogitsAndNone(Heads):
    """Returns the logits, and ``None`` in place of a loss, as nanoGPT does without targets."""

    def forward(self, tokens: torch.Tensor) -> Any:
        logits, _ = super().forward(tokens)
        return logits, None


class Many(Heads):
    """Also returns an early activation, the tokens, and the value a second time; the loss reads none of these."""

    def forward(self, tokens: Tensor) -> Any:
        early = self.layers[0](self.embed(tokens))
        h = early
        for layer in self.layers[1:]:
            h = h + layer(h)
        value = self.value(h).squeeze(-1)
        return {"early": early, "tokens": tokens, "value": value, "logits": self.head(h), "again": value}


class OfMany(CombinedLoss):
    def parts(self, output: Any) -> tuple[Tensor, Tensor]:
        assert [*output] == ["early", "tokens", "value", "logits", "again"]
        assert not output["tokens"].is_floating_point()
        return output["logits"], output["value"]


class Wide(CombinedLoss):
    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        assert {t.dtype for t in output.values()} <= {torch.float32, torch.float64}
        return super().__call__(output, target)


class IntegerOutputs(Heads):
    """Returns integers only: the classes, and whether the value is positive."""

    def forward(self, tokens: Tensor) -> Any:
        made = super().forward(tokens)
        logits, value = made["logits"], made["value"]
        return {"classes": logits.argmax(-1), "sign": (value > 0).long()}


class Single(Heads):
    def forward(self, tokens: Tensor) -> Any:
        logits, _ = super().forward(tokens)
        return (logits,)


class Balanced(Heads):
    """Also returns a number that depends on the full micro batch, of shape ``()`` or ``(experts,)``."""

    def __init__(self, kind: str, experts: int = 0) -> None:
        super().__init__("tuple")
        self.out, self.experts = kind, experts

    def forward(self, tokens: Tensor) -> Any:
        logits, value = super().forward(tokens)
        aux = value.square().mean()
        if self.experts:
            aux = aux.expand(self.experts)
        return aux if self.out == "alone" else {"logits": logits, "value": value, "aux": aux}


class Fixed(Balanced):
    """Accepts micro batches of two samples only."""

    def forward(self, tokens: Tensor) -> Any:
        assert len(tokens) == 2
        return super().forward(tokens)
