"""Replays what ``grow`` found: a value or a message that names a file, in memory proportional to the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.checkpoint.fuzz.readers import CORPUS, READERS, kept, outcome

TIMES, BASE = (
    16,
    1 << 16,
)  # bytes that a reader may use: so many for each byte of its files, and a constant; encrypted files add a block


def test_every_reader_has_a_corpus() -> None:
    assert {path.stem for path in CORPUS.iterdir()} == READERS.keys()
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 300_000


@pytest.mark.parametrize("name", READERS)
def test_no_kept_input_breaks_its_reader(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    reader.make(tmp_path)
    inputs = kept(name)
    for data in inputs:  # the first call imports modules and fills caches
        outcome(reader, tmp_path, data)
    around = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    for data in inputs:
        tracemalloc.start()
        try:
            outcome(reader, tmp_path, data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= TIMES * (len(data) + around) + BASE + reader.block, (peak, len(data), data[:80])
