"""From the settings of ``data=tokens`` to its samples."""

from __future__ import annotations

from launcher.data.packing.mixed import MixedSource
from launcher.data.packing.windows import TokenWindows
from launcher.data.source import Dataset
from launcher.data.token_files.corpus import corpus
from launcher.errors import RequestError
from launcher.job.schema.components import Tokens


def open_tokens(settings: Tokens) -> Dataset:
    """Raises ``RequestError``. The entropy is not known: it would take reading all of it."""
    made, found = corpus(settings)
    if made is None:
        raise RequestError(tuple(found))
    *parts, val = (
        TokenWindows(windows, settings.seq_len, made.vocab_size, apart=settings.document_mask)
        for windows in (*made.train, made.val)
    )
    return Dataset(MixedSource(parts, made.mixture) if settings.sources else parts[0], val)
