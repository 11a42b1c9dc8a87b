"""The corpus of ``steps=[prepare]``: its files, a digest of their content, and the tasks that encode it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from launcher.data.prepare.child_processes import Encode
from launcher.data.prepare.corpus_formats import LINES, CorpusFile
from launcher.data.prepare.documents import Kind, Position, TextBlock, blocks
from launcher.data.prepare.vocabulary import trained_end, vocabulary
from launcher.errors import RunError
from launcher.job.schema.steps import Prepare
from launcher.untrusted.files import opened

VERSION = 1  # the version of the prepared format: folders of another one are made again
CHUNK = 8 << 20  # bytes digested at once


@dataclass(frozen=True)
class TextCorpus:
    """A corpus. ``digest``: of all that the tokens depend on. ``seen``: size and mtime of each file."""

    settings: Prepare
    files: tuple[CorpusFile, ...]
    digest: str
    seen: tuple[tuple[int, int], ...]

    @classmethod
    def from_files(cls, settings: Prepare, files: Sequence[CorpusFile]) -> TextCorpus:
        """Computes the digest. Reads every file."""
        seen = tuple(_seen(file.path) for file in files)
        read = [(file.form, file.packing, content_digest(file.path)) for file in files]
        digest = xxhash.xxh3_128_hexdigest(json.dumps([VERSION, _options(settings), read]).encode())
        return cls(settings, tuple(files), digest, seen)

    @property
    def settings_digest(self) -> str:
        return settings_digest(self.settings)

    @property
    def skips(self) -> bool:
        return self.settings.on_bad == "skip"

    def is_in(self, manifest: dict[str, Any]) -> bool:
        """Whether ``manifest`` says that this corpus is in its folder."""
        return manifest.get("digest") == self.digest and (self.skips or not manifest.get("skipped"))

    def check_unchanged(self) -> None:
        """Raises ``RunError`` if a file has changed since its digest was taken."""
        for file, seen in zip(self.files, self.seen, strict=True):
            if _seen(file.path) != seen:
                raise RunError(f"{file.path}: it changed while it was read; start again")

    def blocks(self, at: Position) -> Iterator[TextBlock]:
        return blocks(self.files, at, field=self.settings.field, documents=self.settings.documents)

    def task(self, block: TextBlock) -> Encode:
        """The task that encodes a block."""
        form = self.files[block.start.file].form
        kind: Kind = "jsonl" if form == "jsonl" else "values" if form not in LINES else "text"
        if form == "text" and self.settings.documents == "line":
            kind = "lines"
        first = block.start.offset == 0
        return Encode(kind, block.data, self.settings.field, first=first, ends=block.ends)

    def place(self, block: TextBlock, row: int) -> str:
        """Where a row of a block is: FILE:LINE, as editors read it, or FILE: row NUMBER of a table."""
        file = self.files[block.start.file]
        number = block.start.row + row + 1
        return f"{file.path}:{number}" if file.form in LINES else f"{file.path}: row {number}"


def settings_digest(settings: Prepare) -> str:
    """xxh3 (128 bits) of the settings that the tokens depend on, the content of the tokenizer among them."""
    return xxhash.xxh3_128_hexdigest(json.dumps([VERSION, _options(settings)]).encode())


def _options(settings: Prepare) -> dict[str, Any]:
    """The settings that the tokens depend on, besides the files of the corpus."""
    options = settings.model_dump(include={"field", "documents", "tokenizer", "vocab_size", "shard_tokens"})
    options["end"] = trained_end(settings) if settings.tokenizer == "bpe" else None
    if settings.tokenizer == "file":
        made = vocabulary(settings)
        options |= {"tokenizer_json": made.tokenizer, "end": made.end}
    return options


def content_digest(path: Path) -> str:
    """xxh3 (128 bits) of a file's content, in bounded memory."""
    digest = xxhash.xxh3_128()
    with opened(path) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _seen(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
