"""Opens plain text as windows of tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.data import text_files, text_tokenizer, train_byte_pairs
from launcher.data.prepare import text_cache
from launcher.data.prepare.documents import text_pieces
from launcher.data.prepare.text_cache import TextTokens
from launcher.data.source import Dataset, entropy
from launcher.data.text_tokenizer import TOKENIZER, decode_bytes, encode_bytes
from launcher.data.tokens.windows import Windows
from launcher.errors import Problem, RequestError
from launcher.job.schema.data import Text


def open_text(settings: Text) -> Dataset:
    """Opens the text. Raises ``RequestError`` if BPE makes too few tokens for a window.

    The checks of the plan cannot find this, because only encoding shows it.
    """
    return _bytes(settings) if settings.tokenizer == "bytes" else _learned(settings)


def _bytes(settings: Text) -> Dataset:
    train, val = (Windows(part, settings.seq_len) for part in text_files.split(settings))
    return Dataset(
        train,
        val,
        entropy(val),
        encode=encode_bytes,
        decode=decode_bytes,
        token_bytes=[1] * settings.vocab_size,
    )


def _learned(settings: Text) -> Dataset:
    made = text_cache.cached_tokens(settings) or _tokens(settings)
    tokenizer = made.tokenizer

    # only encoding shows how many tokens a text has
    train, val = (Windows(part, settings.seq_len) for part in (made.train, made.val))
    if not len(train):
        need = f"{settings.seq_len + 1} (data.seq_len={settings.seq_len}, and one for the last target)"
        source = text_files.where(settings)
        text = f"{source}: {len(train.tokens)} training tokens are too few: a sample needs {need}"
        raise RequestError((Problem("data.path", text, "data.tokenizer=bytes data.vocab_size=256"),))

    file = _name(settings)

    def encode(text: str) -> list[int]:
        return [int(i) for i in text_tokenizer.encode(tokenizer, text, file)]

    sizes = text_tokenizer.token_bytes(tokenizer) if settings.tokenizer_file is None else None
    decode = partial(text_tokenizer.decode, tokenizer, file=file)
    return Dataset(train, val, entropy(val), encode=encode, decode=decode, token_bytes=sizes)


def _tokens(settings: Text) -> TextTokens:
    """Tokenizes the text in this process, without a cache."""
    parts = text_files.split(settings)
    if settings.tokenizer_file is None:
        tokenizer = train_byte_pairs.train(parts[0].tobytes().decode(), settings.vocab_size)
    else:
        tokenizer = text_tokenizer.load(Path(settings.tokenizer_file))
    file = _name(settings)

    def encoded(part: NDArray[np.uint8]) -> NDArray[np.int32]:
        pieces = (piece.decode() for piece in text_pieces(part))
        return np.concatenate([text_tokenizer.encode(tokenizer, piece, file) for piece in pieces])

    return TextTokens(tokenizer, *map(encoded, parts))


def _name(settings: Text) -> str:
    """Returns what errors call the tokenizer."""
    return settings.tokenizer_file or TOKENIZER
