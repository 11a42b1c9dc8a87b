"""Computes a digest of a data set's files, which shows whether they have changed or only moved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from launcher.data import mnist5k, text_files
from launcher.data.chat import conversation_files
from launcher.data.prepare.corpus_digest import content_digest
from launcher.data.tokens.corpus import corpus
from launcher.data.tokens.token_file import TokenFile
from launcher.job.schema.components import Data
from launcher.job.schema.data import Chat, Cifar10, Idx, ImageFolder, Mnist5k, Text, Tokens
from launcher.optional import image_files
from launcher.untrusted.files import opened

LARGEST_DIGESTED = 1 << 20  # the most bytes of a file that is digested completely
BLOCKS, BLOCK = 8, 1 << 14  # the number of blocks that are digested of a longer file, and their bytes
SHOWN = 16  # hexadecimal digits that are shown
SAMPLED = 10_000
"""The most images whose content is read, evenly spread. It takes about a second."""


def contents(settings: Data) -> str | None:
    """Returns the size and a digest of the files that samples are read from.

    It returns ``None`` for random tokens, a user's class, and invalid token files. A digest of token files
    uses the digests in their headers. Other token files may be of any size, so they are digested in part. A
    digest of images covers the names of all files, and the sizes and contents of at most ``SAMPLED``.
    ``_in_part`` says which bytes of a large file are read.
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
        case ImageFolder() | Idx() | Cifar10():
            return _of_images(image_files.files(settings))
        case Mnist5k():
            file = mnist5k.where()
            return None if file is None else _of_texts([file], None)
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


def _of_images(files: Sequence[tuple[str, Path]]) -> str:
    step = max(len(files) - 1, 1) / max(min(len(files), SAMPLED) - 1, 1)
    read = dict.fromkeys(min(round(k * step), len(files) - 1) for k in range(min(len(files), SAMPLED)))
    names = xxhash.xxh3_128_hexdigest("\0".join(name for name, _ in files).encode(errors="surrogateescape"))
    return _described(f"{len(files)} files", [names, *(_in_part(files[k][1]) for k in read)])


def _described(amount: str, digests: Iterable[str]) -> str:
    digest = xxhash.xxh3_128_hexdigest(" ".join(digests).encode())
    return f"{amount} with the digest {digest[:SHOWN]}"


def _digest(file: TokenFile) -> str:
    return _in_part(file.path) if file.digest is None else file.digest


def _in_part(path: Path) -> str:
    """Returns the size and a digest of a file.

    Of a file of more than ``LARGEST_DIGESTED`` bytes, only ``BLOCKS`` blocks are read, evenly spread.
    """
    digest = xxhash.xxh3_128()
    with opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= LARGEST_DIGESTED:
            digest.update(stream.read())
        else:
            for k in range(BLOCKS):
                stream.seek((size - BLOCK) * k // (BLOCKS - 1))
                digest.update(stream.read(BLOCK))
    return f"{size} {digest.hexdigest()}"
