"""Encodes documents as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data import text_files
from launcher.data.prepare.corpus import inside_text
from launcher.job.schema.steps import Prepare
from launcher.untrusted.files import read_json

PIECE = 1 << 20  # characters encoded at once


@dataclass(frozen=True)
class Recipe:
    """How to encode. ``tokenizer``: the content of a tokenizer.json; ``None`` for bytes.

    ``end``: the token that ends each document. ``cuts``: truncate what is longer than the tokenizer.json
    allows, as ``data=text`` does with lines.
    """

    tokenizer: str | None
    end: int
    cuts: bool = False


class Encoder:
    """Encodes documents of any length; needs memory for ``PIECE`` characters only."""

    def __init__(self, recipe: Recipe) -> None:
        self._end = np.array([recipe.end], np.uint32)
        self._tokenizer = None
        if recipe.tokenizer is not None:
            self._tokenizer = Tokenizer.from_str(recipe.tokenizer)
            if not recipe.cuts:
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()

    def __call__(self, texts: Sequence[str], end: bool) -> NDArray[np.uint32]:
        """Encodes all ``texts``; if ``end``, an end token follows each of them."""
        return np.concatenate(
            [np.zeros(0, np.uint32), *(self._batch(batch, end) for batch in _batches(texts))]
        )

    def lines(self, text: str) -> NDArray[np.uint32]:
        """Encodes a text line by line."""
        assert self._tokenizer is not None
        return text_files.encode(self._tokenizer, text).astype(np.uint32)

    def _batch(self, batch: list[tuple[str, bool]], end: bool) -> NDArray[np.uint32]:
        """Encodes pieces; each comes with a flag that its text ends there."""
        parts = []
        for ids, (_, last) in zip(self._ids([piece for piece, _ in batch]), batch, strict=True):
            parts += [ids, self._end] if last and end else [ids]
        return np.concatenate(parts)

    def _ids(self, pieces: list[str]) -> Iterator[NDArray[np.uint32]]:
        if self._tokenizer is None:
            yield from (np.frombuffer(piece.encode(), np.uint8).astype(np.uint32) for piece in pieces)
            return
        for row in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False):
            yield np.array(row.ids, np.uint32)


def _batches(texts: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
    """Batches of about ``PIECE`` characters: pieces of texts, each with a flag that its text ends there."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        for piece, last in _pieces(text):
            batch.append((piece, last))
            size += len(piece)
            if size >= PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Splits a long text where ``inside_text`` allows it."""
    if len(text) <= PIECE:
        yield text, True
        return
    data: Any = text.encode()
    while len(data) > PIECE:
        at = inside_text(data[:PIECE])
        yield data[:at].decode(), False
        data = data[at:]
    yield data.decode(), True


TRAINED_END = "<|endoftext|>"  # of BPE trained here, unless the settings name another one
BYTES_END = 256
SHOWN = 6  # tokens listed in a message


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer. ``tokenizer``: its tokenizer.json; ``None`` for bytes. Every token is below ``size``."""

    tokenizer: str | None
    size: int
    end: int
    end_text: str


class NoEnd(ValueError):
    """The token that ends a document is unknown."""


def vocabulary(settings: Prepare, trained: str | None = None) -> Vocabulary:
    """The vocabulary of the tokenizer that ``settings`` name, or of the ``trained`` tokenizer.json.

    Raises ``ValueError`` for a file that is not a tokenizer, and ``NoEnd``.
    """
    if settings.tokenizer == "bytes":
        return Vocabulary(None, BYTES_END + 1, BYTES_END, "end of document")
    if settings.tokenizer_file is None:
        assert trained is not None
        return _vocabulary_of(Tokenizer.from_str(trained), trained_end(settings))
    path = Path(settings.tokenizer_file)
    tokenizer = text_files.load(path)
    return _vocabulary_of(tokenizer, settings.end_of_document or _beside(path, tokenizer), path)


def trained_end(settings: Prepare) -> str:
    """The text of the end token of BPE that is trained here."""
    return settings.end_of_document or TRAINED_END


def _vocabulary_of(tokenizer: Tokenizer, end: str, path: Path | None = None) -> Vocabulary:
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise NoEnd(f"{end}: {path} has no such token; {_special(tokenizer)}")
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return Vocabulary(str(tokenizer.to_str()), size, int(end_id), end)


def _beside(path: Path, tokenizer: Tokenizer) -> str:
    """The end-of-text token, according to the files of transformers beside ``path``. Raises ``NoEnd``."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = path.with_name(name)
        if beside.is_file():
            content = read_json(beside)
            token = content.get("eos_token") if isinstance(content, dict) else None
            if text := _text(token):
                if tokenizer.token_to_id(text) is None:
                    raise NoEnd(f"null: {beside} says {text}, which {path} has not; {_special(tokenizer)}")
                return text
    files = "tokenizer_config.json with an eos_token"
    raise NoEnd(
        f"null: no {files} is beside {path}, so name the token that ends a document; {_special(tokenizer)}"
    )


def _text(token: Any) -> str:
    """The text of a token that is given as a string or as an object with settings."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _special(tokenizer: Tokenizer) -> str:
    added = tokenizer.get_added_tokens_decoder()
    names = [added[i].content for i in sorted(added) if added[i].special]
    if not names:
        return "it has no special tokens"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"its special tokens: {', '.join(names[:SHOWN])}{more}"
