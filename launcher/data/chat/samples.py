"""The samples of ``data=chat``: one conversation each, or several that are packed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from launcher.data.chat import tokens as chat_tokens
from launcher.data.chat.chat_tokenizer import chat_tokenizer
from launcher.data.chat.tokens import TokenizedConversations, in_memory
from launcher.data.file_kinds import BadFile
from launcher.data.shuffle import Indices
from launcher.data.source import Dataset, Source
from launcher.data.tokens.bin_packing import BLOCK, Numbers, packed
from launcher.errors import Problem, RequestError
from launcher.job.schema.data import Chat
from launcher.plan.values.class_dims import IGNORED

Samples = tuple[Numbers, Numbers]
"""The indices of conversations, those of a sample adjacent, and the offsets at which samples begin."""


class Conversations(Source):
    """Sample ``i`` is a conversation, padded at its end; a target is the next token if it is trained on.

    No token attends to later tokens, and padding has no target. If ``packed``, a sample contains several
    conversations; a second input numbers them, and gives the padding the next number.
    """

    def __init__(
        self, made: TokenizedConversations, seq_len: int, first: int, count: int, *, packed: bool
    ) -> None:
        self.made, self.seq_len, self.first, self.packed = made, seq_len, first, packed
        self._samples = _in_order(count)
        if packed:
            ends = made.ends[first : first + count]
            before = made.ends[first - 1] if first else 0
            self._samples = best_fits(np.diff(ends, prepend=before) - 1, seq_len)

    def __len__(self) -> int:
        return len(self._samples[1]) - 1

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        tokens, numbers, _ = self._read(indices)
        return (tokens, numbers) if self.packed else (tokens,)

    def targets(self, indices: Indices) -> Tensor:
        return self._read(indices)[2]

    def _read(self, indices: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens, the numbers of their conversations, and the targets."""
        tokens, numbers, targets = np.zeros((3, len(indices), self.seq_len), np.int64)
        targets[:] = IGNORED
        for row, index in enumerate(indices.tolist()):
            at = 0
            conversations = self._conversations_of(index)
            for number, conversation in enumerate(conversations):
                mine = self._at(conversation)
                ids, counted = self.made.tokens[mine].astype(np.int64), self.made.counted[mine][1:]
                here = slice(at, at + len(ids) - 1)
                tokens[row, here], numbers[row, here] = ids[:-1], number
                targets[row, here] = np.where(counted, ids[1:], IGNORED)
                at = here.stop
            numbers[row, at:] = len(conversations)
        return torch.from_numpy(tokens), torch.from_numpy(numbers), torch.from_numpy(targets)

    def _conversations_of(self, index: int) -> list[int]:
        """Returns the indices of the conversations in a sample."""
        order, first = self._samples
        rows: list[int] = order[first[index] : first[index + 1]].tolist()
        return rows

    def _at(self, conversation: int) -> slice:
        k = self.first + conversation
        return slice(int(self.made.ends[k - 1]) if k else 0, int(self.made.ends[k]))


def _in_order(count: int) -> Samples:
    return np.arange(count), np.arange(count + 1)


def best_fits(lengths: Numbers, seq_len: int) -> Samples:
    """Packs conversations into samples by best fit, the same in every process and for every seed."""
    orders, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for block, start in enumerate(range(0, len(lengths), BLOCK)):
        order, count = packed(lengths[start : start + BLOCK], seq_len, block)
        orders.append(order + start)
        sizes.append(count)
    return np.concatenate(orders), np.cumsum(np.concatenate(sizes))


def open_chat(settings: Chat) -> Dataset:
    """Opens the conversations, from the cache if possible. Raises ``RequestError``."""
    parts = chat_tokens.opened(settings) or _made(settings)
    train, n = parts["train"], len(parts["train"])
    held_out = 0 if "val" in parts else round(n * settings.val_fraction)
    if n - held_out < 1:
        text = f"{n} conversations, of which {held_out} are held out, so none is left to train on"
        raise RequestError((Problem("data.path", text),))

    def source(made: TokenizedConversations, first: int, count: int) -> Conversations:
        return Conversations(made, settings.seq_len, first, count, packed=settings.packing == "best_fit")

    val = source(parts["val"], 0, len(parts["val"])) if "val" in parts else None
    return Dataset(
        source(train, 0, n - held_out),
        val or source(train, n - held_out, held_out),
        fraction=None if val else settings.val_fraction,
    )


def _made(settings: Chat) -> dict[str, TokenizedConversations]:
    """Tokenizes the conversations in this process, without a cache."""
    by = chat_tokenizer(settings)
    paths = {"train": settings.path} | ({} if settings.val is None else {"val": settings.val})
    try:
        return {part: in_memory(settings, by, where) for part, where in paths.items()}
    except BadFile as error:
        raise RequestError((Problem("data.path", str(error)),)) from error
