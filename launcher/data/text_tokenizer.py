"""Encodes and decodes text, as bytes or with a loaded tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data import bounded_tokenizer
from launcher.data.bounded_tokenizer import LONGEST, native_errors
from launcher.untrusted.files import read_bytes
from launcher.untrusted.hub_name_hint import download_hint

TOKENIZER = "tokenizer.json"
"""The name of a tokenizer's file in Hugging Face folders."""


def encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def decode_bytes(ids: Sequence[int]) -> str:
    """Decodes bytes. Bytes that are not UTF-8, which an untrained model produces, become U+FFFD."""
    return bytes(ids).decode("utf-8", errors="replace")


def inside(path: Path) -> Path | None:
    """Returns the tokenizer's file if ``path`` is a folder that has one, else ``None``."""
    return path / TOKENIZER if (path / TOKENIZER).is_file() else None


def load(path: Path, *, tried: bool = False) -> Tokenizer:
    """Loads a ``tokenizer.json``. Raises ``ValueError``, naming the file, if it is not a tokenizer.

    Truncation and padding that the file sets are switched off: they are those of one call of the program that
    wrote it, and would drop the end of each text, or add padding that is learned.

    It is tried in a child process first, unless this was done before (``tried``).
    """
    try:
        data = read_bytes(path, LONGEST)
        if not tried:
            bounded_tokenizer.check(path)
        tokenizer = Tokenizer.from_buffer(data)
    except OSError as error:
        if own := inside(path):
            raise ValueError(f"{path}: this is a folder; give the file {own}") from error
        text = f"{path}: not a tokenizer: {error.strerror}{download_hint(path, 'model')}"
        raise ValueError(text) from error
    except bounded_tokenizer.Unusable:
        raise
    except BaseException as error:  # tokenizers raises no narrower type
        if not bounded_tokenizer.is_native(error):
            raise
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{path}: not a tokenizer: it has no tokens")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, file: object = TOKENIZER) -> NDArray[np.int32]:
    """Encodes ``text`` at once, as transformers does; ``documents.text_pieces`` splits a long one before.

    Raises ``TokenizerError``, which names ``file``, if the tokenizer library fails.
    """
    with native_errors(file):
        (row,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(row.ids, np.int32)


def vocab_size(tokenizer: Tokenizer) -> int:
    """Returns the smallest vocabulary size that has all ids; there may be ids that no token has."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Returns the number of bytes of each token of a tokenizer that ``train`` made.

    Such a tokenizer writes every byte as one character.
    """
    return [len(str(tokenizer.id_to_token(i))) for i in range(tokenizer.get_vocab_size())]


def decode(tokenizer: Tokenizer, ids: Sequence[int], file: object = TOKENIZER) -> str:
    """Decodes tokens. Raises ``TokenizerError`` as ``encode`` does."""
    with native_errors(file):
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))
