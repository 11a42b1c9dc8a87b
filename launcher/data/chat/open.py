"""From the settings of ``data=chat`` to its samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from launcher.data.chat import cache
from launcher.data.chat.tokenizer import chat_tokenizer
from launcher.data.chat.tokens import ChatTokens, in_memory
from launcher.data.files.bad_file import BadFile
from launcher.data.shuffle import Indices
from launcher.data.source import Dataset, Source
from launcher.errors import Problem, RequestError
from launcher.job.schema.components import Chat
from launcher.plan.values.facts import IGNORED


class Conversations(Source):
    """Sample ``i`` is a conversation, padded at its end; a target is the token after, where that counts.

    Nothing attends to what comes after it, and what is padded has no target.
    """

    def __init__(self, made: ChatTokens, seq_len: int, first: int, count: int) -> None:
        self.made, self.seq_len, self.first, self.count = made, seq_len, first, count

    def __len__(self) -> int:
        return self.count

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        out = np.zeros((len(indices), self.seq_len), np.int64)
        for row, index in zip(out, indices.tolist(), strict=True):
            tokens = self.made.tokens[self._at(index)][:-1]
            row[: len(tokens)] = tokens
        return (torch.from_numpy(out),)

    def targets(self, indices: Indices) -> Tensor:
        out = np.full((len(indices), self.seq_len), IGNORED, np.int64)
        for row, index in zip(out, indices.tolist(), strict=True):
            at = self._at(index)
            tokens, counted = self.made.tokens[at][1:], self.made.counted[at][1:]
            row[: len(tokens)] = np.where(counted, tokens.astype(np.int64), IGNORED)
        return torch.from_numpy(out)

    def _at(self, index: int) -> slice:
        k = self.first + index
        return slice(int(self.made.ends[k - 1]) if k else 0, int(self.made.ends[k]))


def open_chat(settings: Chat) -> Dataset:
    """Raises ``RequestError``."""
    parts = cache.opened(settings) or _made(settings)
    train, n = parts["train"], len(parts["train"])
    held = 0 if "val" in parts else round(n * settings.val_fraction)
    if n - held < 1:
        text = f"{n} conversations, of which {held} are held out: none is left to train on"
        raise RequestError((Problem("data.path", text),))
    length = settings.seq_len
    val = Conversations(parts["val"], length, 0, len(parts["val"])) if "val" in parts else None
    return Dataset(
        Conversations(train, length, 0, n - held),
        val or Conversations(train, length, n - held, held),
        fraction=None if val else settings.val_fraction,
    )


def _made(settings: Chat) -> dict[str, ChatTokens]:
    """By this process for itself."""
    by = chat_tokenizer(settings)
    paths = {"train": settings.path} | ({} if settings.val is None else {"val": settings.val})
    try:
        return {part: in_memory(settings, by, where) for part, where in paths.items()}
    except BadFile as error:
        raise RequestError((Problem("data.path", str(error)),)) from error
