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

VERSION = 1  # the version of the prepared format: folders of another version are made again
CHUNK = 8 << 20  # bytes digested at once


@dataclass(frozen=True)
class TextCorpus:
    """A corpus.

    ``digest`` covers everything that the tokens depend on. ``seen`` has the size and the modification time of
    each file when its digest was computed.
    """

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
        """Returns true if a folder with this ``manifest`` has the tokens of this corpus."""
        return manifest.get("digest") == self.digest and (self.skips or not manifest.get("skipped"))

    def check_unchanged(self) -> None:
        """Raises ``RunError`` if a file has changed since its digest was computed."""
        for file, seen in zip(self.files, self.seen, strict=True):
            if _seen(file.path) != seen:
                raise RunError(f"{file.path}: it changed while it was read; start again")

    def blocks(self, at: Position) -> Iterator[TextBlock]:
        return blocks(self.files, at, field=self.settings.field, documents=self.settings.documents)

    def task(self, block: TextBlock) -> Encode:
        """Returns the task that encodes a block."""
        form = self.files[block.start.file].form
        kind: Kind = "jsonl" if form == "jsonl" else "values" if form not in LINES else "text"
        if form == "text" and self.settings.documents == "line":
            kind = "lines"
        first = block.start.offset == 0
        return Encode(kind, block.data, self.settings.field, first=first, ends=block.ends)

    def place(self, block: TextBlock, row: int) -> str:
        """Returns the place of a row of a block: FILE:LINE or, for a table, FILE: row NUMBER."""
        file = self.files[block.start.file]
        number = block.start.row + row + 1
        return f"{file.path}:{number}" if file.form in LINES else f"{file.path}: row {number}"


def settings_digest(settings: Prepare) -> str:
    """Returns the xxh3 (128 bits) of the settings that the tokens depend on, with the tokenizer's content."""
    return xxhash.xxh3_128_hexdigest(json.dumps([VERSION, _options(settings)]).encode())


def _options(settings: Prepare) -> dict[str, Any]:
    """Returns everything that the tokens depend on, except the files of the corpus."""
    options = settings.model_dump(include={"field", "documents", "tokenizer", "vocab_size", "shard_tokens"})
    options["end"] = trained_end(settings) if settings.tokenizer == "bpe" else None
    if settings.tokenizer == "file":
        made = vocabulary(settings)
        options |= {"tokenizer_json": made.tokenizer, "end": made.end}
    return options


def content_digest(path: Path) -> str:
    """Returns the xxh3 (128 bits) of a file's content, in bounded memory."""
    digest = xxhash.xxh3_128()
    with opened(path) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _seen(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
