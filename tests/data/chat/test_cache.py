"""Conversations from many rows, by many processes, and from tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launcher.__main__ import main
from launcher.data.chat import tokens
from launcher.data.chat.chat_tokenizer import chat_tokenizer
from launcher.data.chat.tokens import ROWS, in_memory
from launcher.data.prepare.progress import ProgressReporter
from tests.data.chat.chats import CHATML, TURNS, messages, request_words, written


def test_many_processes_make_what_one_makes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [messages([("user", "Hi" * (i % 7 + 1)), ("assistant", "No." * (i % 5))]) for i in range(ROWS * 2 + 9)]
    settings = written(tmp_path, CHATML, rows).model_copy(update={"on_bad": "skip"})
    one = in_memory(settings, chat_tokenizer(settings), settings.path)
    kept = settings.model_copy(update={"cache": str(tmp_path / "kept"), "val": settings.path})
    said: list[str] = []
    with ProgressReporter("off", said.append) as speed:
        tokens.make(kept, said.append, speed)
    parts = tokens.opened(kept)
    assert parts is not None
    for part in (parts["train"], parts["val"]):
        assert [a.dtype for a in (part.tokens, part.counted, part.ends)] == [np.uint32, np.uint8, np.int64]
        assert all(np.array_equal(getattr(part, n), getattr(one, n)) for n in ("tokens", "counted", "ends"))
    assert len(one) == len(rows)
    counts = f"{len(rows)} conversations; {len(rows)} conversations held out"
    assert said[0].startswith(f"data: {counts}, tokenized once into ")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_tables_are_read_as_json_lines_are(form: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import pyarrow as pa

    rows = [messages(), messages(TURNS[:2])] * 200
    settings = written(tmp_path, CHATML, rows)
    table = pa.Table.from_pylist([{"id": i, **row} for i, row in enumerate(rows)])
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        from pyarrow import parquet

        parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=150)
    other = settings.model_copy(update={"path": str(path)})
    lines, of_table = (in_memory(s, chat_tokenizer(s), s.path) for s in (settings, other))
    assert all(np.array_equal(getattr(lines, n), getattr(of_table, n)) for n in ("tokens", "counted", "ends"))
    assert len(of_table) == 400


def test_bad_tables(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    settings = written(tmp_path, CHATML, [messages()])
    other = settings.model_copy(update={"path": "t.parquet"})
    monkeypatch.chdir(tmp_path)
    parquet.write_table(pa.table({"text": ["a"], "id": [1]}), "t.parquet")
    assert main([*request_words(other), "show=plan"]) == 2
    told = f"data.path = {other.path}: a row must have 'messages', or 'prompt' and 'completion' (columns: text, id)\n"
    assert told in capsys.readouterr().err
    parquet.write_table(pa.table({"prompt": ["a", "b"], "completion": ["c", None]}), "t.parquet")
    assert main([*request_words(other), "show=plan"]) == 2
    why = "a row must have 'messages', or 'prompt' and 'completion' (keys: prompt)"
    assert f"data.path = {other.path}: row 2: {why}; data.on_bad=skip" in capsys.readouterr().err
