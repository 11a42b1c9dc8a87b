"""Opens ``data=tokens``: turns its settings into samples."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.data.packing.mixed import MixedSource
from launcher.data.packing.packed import PackedDocuments
from launcher.data.packing.windows import TokenWindows
from launcher.data.source import Dataset, Source
from launcher.data.token_files.corpus import corpus
from launcher.data.token_files.file_windows import FileWindows
from launcher.errors import RequestError
from launcher.job.schema.components import Tokens


def open_tokens(settings: Tokens) -> Dataset:
    """Opens prepared tokens, without their entropy, which needs all of them. Raises ``RequestError``."""
    made, found = corpus(settings)
    if made is None:
        raise RequestError(tuple(found))

    def source(windows: Sequence[FileWindows]) -> Source:
        length, apart = settings.seq_len, settings.document_mask
        if settings.packing == "windows":
            return TokenWindows(windows, length, made.vocab_size, apart=apart)
        return PackedDocuments(windows, length, made.vocab_size, packing=settings.packing, apart=apart)

    parts = [source(windows) for windows in made.train]
    train = MixedSource(parts, made.mixture) if settings.sources else parts[0]
    return Dataset(train, source(made.val))
