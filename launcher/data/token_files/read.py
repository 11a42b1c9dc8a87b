"""Recognizes files of tokens by their first bytes and maps their tokens into memory."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from launcher.data.files.bad_file import BadFile
from launcher.data.files.signatures import by_start
from launcher.data.token_files import megatron, nanogpt, own_format
from launcher.data.token_files.token_file import TokenFile
from launcher.errors import RunError
from launcher.untrusted.files import opened

OPEN = 128  # files mapped at once: each uses a descriptor, and many systems allow 1024 per process
CHUNK = 8 << 20  # bytes digested at once
READ = ".tokens, .bin (nanoGPT, llm.c) and .bin with .idx (Megatron) are read"


def token_file(path: Path, dtype: str) -> TokenFile:
    """Checks the header and the size, not the tokens. ``dtype``: for files that do not store it.

    Raises ``BadFile`` and ``OSError``.
    """
    with opened(path) as stream:
        start = stream.read(nanogpt.HEADER)
        size = os.fstat(stream.fileno()).st_size
    if not size:
        raise BadFile("the file is empty")

    if path.suffix == ".tokens" or start.startswith(own_format.MAGIC):
        return own_format.token_file(path, start, size)
    if path.suffix != ".bin":
        raise BadFile(f"not a file of tokens by its name: {READ}")
    index = path.with_suffix(".idx")
    if os.path.lexists(index):
        return megatron.token_file(path, index, size)
    if nanogpt.has_header(start):
        return nanogpt.with_header(path, start, size)

    # two bytes that match a signature could be a token
    kind = by_start(start, least=4)
    if kind is not None:
        raise BadFile(f"{kind.what} by its first bytes, not tokens alone: {READ}")
    return nanogpt.without_header(path, size, dtype)


@lru_cache(maxsize=OPEN)
def mapped(file: TokenFile) -> NDArray[Any]:
    """All tokens of a file, memory-mapped. Each process opens the file on first use.

    Raises ``RunError`` if the file was truncated after it was checked.
    """
    dtype = np.dtype(file.dtype).newbyteorder("<")
    if not file.tokens:
        return np.zeros(0, dtype)  # an empty array cannot be mapped
    try:
        with opened(file.path) as stream:
            return np.memmap(stream, dtype, mode="r", offset=file.offset, shape=(file.tokens,))
    except (OSError, ValueError) as error:
        raise RunError(f"{file.path}: cannot be read any more: {error}") from error


def window(file: TokenFile, start: int, stop: int, vocab_size: int) -> NDArray[Any]:
    """Tokens ``[start, stop)``. Raises ``RunError`` if one is not below ``vocab_size``."""
    tokens = mapped(file)[start:stop]
    wrong = tokens >= vocab_size
    if tokens.dtype.kind == "i":
        wrong |= tokens < 0
    if wrong.any():
        k = int(wrong.argmax())
        text = f"token {start + k} is {tokens[k]}, which is not from 0 to {vocab_size - 1}"
        raise RunError(f"{file.path}: {text}: data.vocab_size is {vocab_size}")
    return tokens


def check_digest(file: TokenFile) -> None:
    """Reads all tokens, in bounded memory. Raises ``BadFile`` if they do not match the digest.

    Files of a format without digests always pass.
    """
    if file.digest is None:
        return
    digest = xxhash.xxh3_128()
    left = file.tokens * np.dtype(file.dtype).itemsize
    with opened(file.path) as stream:
        stream.seek(file.offset)
        while left and (chunk := stream.read(min(CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    if digest.hexdigest() != file.digest:
        raise BadFile("damaged: its tokens have another digest than its header says")
