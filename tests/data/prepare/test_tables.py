"""Tables take bounded memory, whatever their few bytes stand for, and positions outside of their data are refused."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from launcher.__main__ import main as launcher
from launcher.data.prepare import tables
from launcher.data.prepare.corpus_formats import corpus_file
from launcher.data.prepare.tables import LongText, column_values, records
from launcher.errors import RunError
from tests.data.prepare.corpora import prepared

pytestmark = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
LARGE = "x" * (1 << 20)
PEAK = """
import resource, sys
from pathlib import Path
from launcher.data.prepare.corpus_formats import corpus_file
from launcher.data.prepare.tables import column_values, records
file = corpus_file(Path(sys.argv[1]), "auto")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
import pyarrow.parquet
before, rows = peak(), 0
for values in records(file, ["text"]) if sys.argv[2] == "records" else column_values(file, "text", 0):
    rows += len(values)
print(rows, peak() - before)
"""


@pytest.mark.parametrize("how", ["values", "records"])
@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY"])
def test_a_few_bytes_that_stand_for_much_text_take_little_memory(tmp_path, how, encoding):
    import pyarrow as pa
    from pyarrow import parquet

    delta = {} if encoding == "dictionary" else {"use_dictionary": False, "column_encoding": {"text": encoding}}
    parquet.write_table(pa.table({"text": [LARGE] * 1000}), tmp_path / "a.parquet", compression="zstd", **delta)
    words = [sys.executable, "-c", PEAK, str(tmp_path / "a.parquet"), how]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rows, peak = map(int, done.stdout.split())
    assert rows == 1000
    assert peak < 350


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_one_batch_that_takes_too_much_memory_is_refused(tmp_path, kind):
    import pyarrow as pa
    from pyarrow import feather, parquet

    table, src = pa.table({"text": [LARGE] * 400}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, src, use_dictionary=False, compression="zstd", data_page_size=1 << 30)
    else:
        feather.write_feather(table, src, compression="zstd", chunksize=400)
    text = "cannot be read: a batch of rows takes more than 256 MiB; write it in smaller row groups or batches"
    words = [sys.executable, "-m", "launcher.data.prepare", f"src={src}", f"dst={tmp_path}/out", "tokenizer=bytes"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # this process has memory to reuse
    assert (done.returncode, done.stderr) == (1, f"error: {src}: {text}\n")


def test_rows_are_the_same_from_every_start_and_after_smaller_reads(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    texts = [None if i % 7 == 3 else f"{i}" * (i % 13) for i in range(500)]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=200)
    file = corpus_file(tmp_path / "a.parquet", "auto")
    monkeypatch.setattr(tables, "LARGE", 100)
    monkeypatch.setattr(tables, "BATCH", 64)
    for start in (0, 1, 199, 200, 321, 500):
        assert [text for part in column_values(file, "text", start) for text in part] == texts[start:]
    assert [row["text"] for row in records(file, ["text"])] == texts


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("width", ["string", "large_string", "string_view"])
def test_a_text_that_is_too_long_is_a_bad_row(tmp_path, monkeypatch, kind, width):
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(tables, "LONGEST", 100)
    monkeypatch.setattr(tables, "BATCH", 100)
    table, src = pa.table({"text": pa.array(["a", None, "b" * 101, "c"]).cast(width)}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, src)
    else:
        with pa.ipc.new_file(src, table.schema) as stream:
            stream.write_table(table)
    read = [text for part in column_values(corpus_file(src, "auto"), "text", 0) for text in part]
    assert read == ["a", None, LongText(101), "c"]
    common = {"src": str(src), "dst": str(tmp_path / "out"), "tokenizer": "bytes", "workers": 1}
    with pytest.raises(RunError, match=rf"a\.{kind}: row 2: null, not text"):
        prepared(**common)
    assert prepared(on_bad="skip", **common).skipped == 2


def test_positions_outside_of_the_data_are_refused(tmp_path):
    import numpy as np
    import pyarrow as pa

    offsets = np.array([0, 5, 1_000_000, 10, 12], np.int32)
    column = pa.Array.from_buffers(pa.string(), 4, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"a" * 12)])
    batch = pa.record_batch([column], names=["text"])
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(RunError, match=r"a\.arrow: cannot be read: .*out of bounds: 1000000 > 12"):
        prepared(src=str(tmp_path / "a.arrow"), dst=str(tmp_path / "out"), tokenizer="bytes", workers=1)


@pytest.mark.parametrize("steps", ["[prepare]", "[prepare,train]"])
def test_a_page_that_is_damaged_ends_the_step_with_a_line(tmp_path, monkeypatch, capsys, steps):
    """Only decoding shows it, which begins after the plan of ``prepare``."""
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    parquet.write_table(pa.table({"text": ["a"] * 10}), "a.parquet", compression=None)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4 : data.rindex(b"\x00a") + 2] = bytes(data.rindex(b"\x00a") - 2)
    (tmp_path / "a.parquet").write_bytes(data)
    words = [f"steps={steps}", "data=tokens", "data.path=words", "data.seq_len=8", "recipe=lm_single"]
    words += ["steps.prepare.src=a.parquet", "steps.prepare.dst=words", "steps.prepare.tokenizer=bytes"]
    assert launcher(words) == 1
    said = capsys.readouterr()
    assert "a.parquet: cannot be read: " in said.err
    assert "Traceback" not in said.err + said.out
