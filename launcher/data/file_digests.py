"""A description of what the files of a data set contain, which tells changed files from moved ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from launcher.data import text_files
from launcher.data.chat import conversation_files
from launcher.data.prepare.corpus_digest import content_digest
from launcher.data.tokens.corpus import corpus
from launcher.data.tokens.megatron import TokenFile
from launcher.job.schema.components import Data
from launcher.job.schema.data import Chat, Text, Tokens
from launcher.untrusted.files import opened

WHOLE = 1 << 20  # bytes of a file that is digested as a whole
BLOCKS, BLOCK = 8, 1 << 14  # of a longer one so many blocks of so many bytes, from its start to its end
SHOWN = 16  # hexadecimal digits


def contents(settings: Data) -> str | None:
    """The amount and a digest of what samples are read from; ``None`` unless these are text or tokens.

    Files of tokens without a digest in their header may be of any size, so they are digested in part.
    """
    match settings:
        case Text():
            return _of_texts([text_files.where(settings)], settings.tokenizer_file)
        case Chat():
            held_out = [] if settings.val is None else conversation_files.files(settings.val)
            files = [file.path for file in (*conversation_files.files(settings.path), *held_out)]
            return _of_texts(files, settings.tokenizer_file)
        case Tokens():
            return _of_tokens(settings)
        case _:
            return None


def _of_texts(files: Iterable[Path], tokenizer: str | os.PathLike[str] | None) -> str:
    files = [*files]
    size = sum(file.stat().st_size for file in files)
    read = [*files, *([] if tokenizer is None else [Path(tokenizer)])]
    return _described(f"{size} bytes", map(content_digest, read))


def _of_tokens(settings: Tokens) -> str | None:
    opened_files, _ = corpus(settings)
    if opened_files is None:
        return None
    parts = [part for source in (*opened_files.train, opened_files.val) for part in source]
    files = list(dict.fromkeys(part.file for part in parts))
    return _described(f"{sum(file.tokens for file in files)} tokens", map(_digest, files))


def _described(amount: str, digests: Iterable[str]) -> str:
    digest = xxhash.xxh3_128_hexdigest(" ".join(digests).encode())
    return f"{amount} with the digest {digest[:SHOWN]}"


def _digest(file: TokenFile) -> str:
    if file.digest is not None:
        return file.digest
    digest = xxhash.xxh3_128()
    with opened(file.path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE:
            digest.update(stream.read())
        else:
            for k in range(BLOCKS):
                stream.seek((size - BLOCK) * k // (BLOCKS - 1))
                digest.update(stream.read(BLOCK))
    return f"{size} {digest.hexdigest()}"
