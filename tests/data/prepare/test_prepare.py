"""A corpus becomes files of the tokens that `tokenizers` alone makes, whatever its files are and whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.data.prepare.corpus_formats import corpus_file, unpacked
from launcher.data.prepare.documents import Position
from launcher.data.prepare.documents import blocks as blocks_of
from launcher.data.prepare.prepare import OTHER_CORPUS
from launcher.data.prepare.shard_record import published, working_folder
from launcher.data.tokens.corpus import corpus
from launcher.errors import RunError
from launcher.job.schema.data import Tokens
from launcher.job.schema.steps import Prepare
from tests.data.prepare.corpora import (
    END,
    TEXT,
    documents,
    expected,
    gzipped,
    jsonl,
    prepared,
    quiet,
    tokenizer,
    tokens,
)

REPLACES = "name another folder, or set steps.prepare.overwrite=true to replace it"
HAS_ARROW = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
HAS_ZSTD = pytest.mark.skipif(find_spec("zstandard") is None, reason="zstandard is not installed")


def test_tokens_of_json_lines_are_those_of_tokenizers_alone_for_any_number_of_processes(tmp_path):
    file, texts = tokenizer(tmp_path), documents(3000)
    src = [str(jsonl(tmp_path / "a.jsonl", texts[:1000])), str(gzipped(jsonl(tmp_path / "b.jsonl", texts[1000:])))]
    ways = {"one": {"workers": 1, "shard_tokens": 10_000}, "three": {"workers": 3}}
    for dst, way in ways.items():
        done = prepared(src=src, dst=str(tmp_path / dst), tokenizer_file=str(file), **way)
        assert tokens(tmp_path / dst) == expected(file, texts)
        assert (done.documents, done.skipped, done.end) == (sum(map(bool, texts)), 0, END)

    # and a run can read them
    found, wrong = corpus(Tokens(name="tokens", path=str(tmp_path / "three"), seq_len=64))
    assert (found.vocab_size, wrong) == (600, [])
    assert json.loads((tmp_path / "three/tokenizer.json").read_text()) == json.loads(file.read_text())


@HAS_ARROW
@pytest.mark.parametrize("kind", ["parquet", "feather", "datasets"])
def test_a_column_of_a_table_gives_the_same_tokens(tmp_path, kind):
    import pyarrow as pa
    from pyarrow import feather, parquet

    file, texts = tokenizer(tmp_path), documents(2000)
    table = pa.table({"id": range(len(texts)), "content": texts})
    src = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, src, row_group_size=300)
    elif kind == "feather":
        feather.write_feather(table, src)
    else:
        src.mkdir()
        names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
        for name, part in zip(names, (table[:700], table[700:]), strict=True):
            with pa.ipc.new_stream(src / name, table.schema) as stream:
                stream.write_table(part, max_chunksize=100)
        (src / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (src / "dataset_info.json").write_text("{}")
    prepared(src=str(src), dst=str(tmp_path / "out"), field="content", tokenizer_file=str(file), workers=1)
    assert tokens(tmp_path / "out") == expected(file, texts)


@HAS_ZSTD
def test_zstandard_is_unpacked_also_in_several_frames(tmp_path):
    import zstandard

    file, texts = tokenizer(tmp_path), documents(500)
    data = jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(data[:999]) + zstandard.compress(data[999:]))
    prepared(src=str(tmp_path / "b.jsonl.zst"), dst=str(tmp_path / "out"), tokenizer_file=str(file), workers=1)
    assert tokens(tmp_path / "out") == expected(file, texts)


def test_plain_text_is_a_document_a_file_or_a_line(tmp_path):
    file = tokenizer(tmp_path)
    (tmp_path / "in").mkdir()
    long = TEXT + TEXT[:200_000]  # longer than a block
    (tmp_path / "in/a.txt").write_text(long)
    (tmp_path / "in/b.txt").write_text("one\r\ntwo\n\nthree")
    common = {"src": str(tmp_path / "in"), "tokenizer_file": str(file), "workers": 2}
    prepared(dst=str(tmp_path / "files"), **common)
    assert tokens(tmp_path / "files") == expected(file, [long, "one\r\ntwo\n\nthree"])
    common["src"] = str(tmp_path / "in/b.txt")
    prepared(dst=str(tmp_path / "lines"), documents="line", **common)
    assert tokens(tmp_path / "lines") == expected(file, ["one", "two", "three"])


def test_bytes_and_byte_pairs_that_are_trained_here_need_no_file(tmp_path):
    src = jsonl(tmp_path / "a.jsonl", ["ab", "é"])
    prepared(src=str(src), dst=str(tmp_path / "bytes"), tokenizer="bytes", workers=1)
    assert tokens(tmp_path / "bytes") == [97, 98, 256, 0xC3, 0xA9, 256]
    texts = documents(1500)
    jsonl(src, texts)
    done = prepared(
        src=str(src), dst=str(tmp_path / "bpe"), tokenizer="bpe", vocab_size=700, end_of_document=END, workers=1
    )
    assert done.vocab_size == 700
    assert tokens(tmp_path / "bpe") == expected(tmp_path / "bpe/tokenizer.json", texts)


def test_a_bad_line_is_named_by_its_number_or_skipped_and_counted(tmp_path):
    file, src = tokenizer(tmp_path), tmp_path / "a.jsonl"
    lines = [
        b'{"text": "one"}', b'{"text": ', b"[1]", b'{"other": 1}', b'{"text": null}', b'{"text": "\xff"}',
        b'{"text": "\\ud800"}', b"", b'{"text": "two"}', b"[" * 100_000,
    ]  # fmt: skip
    src.write_bytes(b"\n".join(lines))
    whys = [
        "2: not JSON: Expecting value at character 9",
        "3: an array, not an object",
        "4: no key 'text' (keys: other)",
        "5: 'text' is null, not text",
        "6: byte 10 of the line is not UTF-8",
        "7: half a surrogate pair, which UTF-8 cannot encode",
        "10: not JSON within limits: too deep, or a number too long",
    ]
    common = {"src": str(src), "dst": str(tmp_path / "out"), "tokenizer_file": str(file), "workers": 1}
    for why in whys:
        with pytest.raises(RunError) as error:
            prepared(**common)
        cure = "steps.prepare.on_bad=skip leaves out bad rows and counts them"
        assert str(error.value) == f"{src}:{why}; {cure}"
        row = int(why.partition(":")[0]) - 1
        src.write_bytes(b"\n".join([b"" if i <= row and i else line for i, line in enumerate(lines)]))

    src.write_bytes(b"\n".join(lines))
    done = prepared(on_bad="skip", **common)
    assert (done.documents, done.skipped) == (2, 7)
    assert tokens(tmp_path / "out") == expected(file, ["one", "two"])
    with pytest.raises(RunError, match=f"^{tmp_path}/out: {OTHER_CORPUS}; {REPLACES}$"):
        prepared(**common)  # which omits nothing


def test_lines_of_a_text_that_are_no_utf8_are_left_out(tmp_path):
    file, src = tokenizer(tmp_path), tmp_path / "a.txt"
    src.write_bytes(b"one\nt\xffwo\nthree\n")
    common = {"src": str(src), "dst": str(tmp_path / "out"), "tokenizer_file": str(file), "workers": 1}
    with pytest.raises(RunError, match=r"a\.txt:2: byte 1 of the line is not UTF-8"):
        prepared(**common)
    assert prepared(on_bad="skip", **common).skipped == 1
    assert tokens(tmp_path / "out") == expected(file, ["one\nthree\n"])


def test_a_line_that_is_too_long_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.data.prepare.documents.BLOCK", 1000)
    monkeypatch.setattr("launcher.data.prepare.documents.LONGEST_LINE", 4000)
    file, texts = tokenizer(tmp_path), ["one", "a" * 6000, "two", "b" * 2500]
    src = jsonl(tmp_path / "a.jsonl", texts)
    common = {"src": str(src), "dst": str(tmp_path / "out"), "tokenizer_file": str(file), "workers": 1}
    with pytest.raises(RunError, match=r"a\.jsonl:2: a line of 6022 bytes; at most 4000 are read"):
        prepared(**common)
    prepared(on_bad="skip", **common)
    assert tokens(tmp_path / "out") == expected(file, ["one", "two", "b" * 2500])


def test_the_same_corpus_is_prepared_once_and_another_is_not_put_over_it(tmp_path):
    file, src = tokenizer(tmp_path), jsonl(tmp_path / "a.jsonl", ["one", "two"])
    common = {"src": str(src), "dst": str(tmp_path / "out"), "tokenizer_file": str(file)}
    assert prepared(workers=1, **common).anew
    again = prepared(workers=2, **common)  # the number of processes does not matter
    assert not again.anew
    assert again.text("out") == "out: it exists already: 6 tokens (ids below 600) of 2 documents, each ended by <|end|>"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []

    jsonl(src, ["one", "six"])
    with pytest.raises(RunError, match=f"^{tmp_path}/out: {OTHER_CORPUS}; {REPLACES}$"):
        prepared(workers=1, **common)
    prepared(workers=1, overwrite=True, **common)
    assert tokens(tmp_path / "out") == expected(file, ["one", "six"])
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_start_after_a_kill_goes_on_behind_whole_files_to_the_same_bytes(tmp_path):
    file, texts = tokenizer(tmp_path), documents(4500)
    src = [str(gzipped(jsonl(tmp_path / "a.jsonl", texts * 3))), str(jsonl(tmp_path / "b.jsonl", texts[:900]))]
    settings = [f"tokenizer_file={file}", "shard_tokens=60000", "workers=2", f"src=[{','.join(src)}]"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "launcher.data.prepare", *settings]
    work = working_folder(killed)

    # at several moments: before the first file is complete, and after it
    for files in range(2):
        with subprocess.Popen([*command, f"dst={killed}"], stdout=subprocess.DEVNULL) as process:
            while len(list(work.glob("*.done.json"))) < files and process.poll() is None:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not killed.exists()
    lines: list[str] = []
    asked = {"tokenizer_file": str(file), "shard_tokens": 60000, "src": src}
    quiet(Prepare(dst=str(killed), workers=1, **asked), lines)
    quiet(Prepare(dst=str(whole), workers=2, **asked), [])
    assert any("continues after" in line for line in lines)
    assert {p.name: p.read_bytes() for p in killed.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
    assert len(list(whole.glob("*.tokens"))) > 2
    assert tokens(killed) == expected(file, [*texts * 3, *texts[:900]])


def test_a_full_disk_is_reported_and_complete_files_stay(tmp_path):
    file, src = tokenizer(tmp_path), jsonl(tmp_path / "a.jsonl", documents(3000))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from launcher.data.prepare.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [f"src={src}", f"dst={tmp_path}/out", f"tokenizer_file={file}", "workers=1", "shard_tokens=40000"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    folder = working_folder(tmp_path / "out")
    assert done.returncode == 1
    cause = f"error: {folder}: cannot be written: File too large"
    assert done.stderr == f"{cause}; the same command continues after the complete files\n"
    assert published(tmp_path / "out") is None


def test_a_file_that_is_packed_wrongly_is_named(tmp_path):
    file, src = tokenizer(tmp_path), gzipped(jsonl(tmp_path / "a.jsonl", documents(3000)))
    src.write_bytes(src.read_bytes()[:-1000])
    with pytest.raises(RunError, match=r"a\.jsonl\.gz: cannot be unpacked: Compressed file ended before"):
        prepared(src=str(src), dst=str(tmp_path / "out"), tokenizer_file=str(file), workers=1)


@HAS_ZSTD
@pytest.mark.parametrize("settings", [{}, {"on_bad": "skip"}, {"format": "text"}])
def test_a_zstandard_file_that_is_cut_short_is_named(tmp_path, settings):
    import zstandard

    data = jsonl(tmp_path / "a.jsonl", documents(3000)).read_bytes()
    src = tmp_path / "a.jsonl.zst"
    src.write_bytes(zstandard.compress(data)[:-1000])
    with pytest.raises(
        RunError, match=r"a\.jsonl\.zst: cannot be unpacked: the file ends inside a Zstandard frame: it"
    ):
        prepared(src=str(src), dst=str(tmp_path / "out"), tokenizer="bytes", workers=1, **settings)


@HAS_ZSTD
def test_zstandard_is_unpacked_in_bounded_memory(tmp_path):
    import resource

    import zstandard

    src = tmp_path / "a.jsonl.zst"
    src.write_bytes(zstandard.compress(b"\n" * (1 << 29)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with unpacked(corpus_file(src, "auto")) as stream:
        assert sum(len(block) for block in iter(lambda: stream.read(1 << 20), b"")) == 1 << 29
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@HAS_ARROW
def test_the_size_of_a_table_is_that_of_its_texts_in_utf8(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = ["one", "grüße", "日本語", None]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    blocks = list(blocks_of([corpus_file(tmp_path / "a.parquet", "auto")], Position(), field="text", documents="file"))
    assert sum(block.nbytes for block in blocks) == sum(len((text or "").encode()) for text in texts)


@HAS_ARROW
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("width", ["string", "large_string", "string_view"])
def test_a_text_of_a_table_that_is_no_utf8_is_named_with_its_row_or_left_out(tmp_path, kind, width):
    import pyarrow as pa
    from pyarrow import parquet

    texts = pa.array([b"a", b"caf\xe9", None, b"d\xc3\xa9j\xc3\xa0"]).cast(width.replace("string", "binary"))
    column = texts.view(width)
    table, src = pa.table({"text": column}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, src)
    else:
        with pa.ipc.new_file(src, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(RunError, match=rf"a\.{kind}: row 2: byte 3 of the text is not UTF-8"):
        prepared(src=str(src), dst=str(tmp_path / "out"), tokenizer="bytes", workers=1)
    found = prepared(src=str(src), dst=str(tmp_path / "out"), tokenizer="bytes", workers=1, on_bad="skip")
    assert (found.documents, found.skipped) == (2, 2)
    assert tokens(tmp_path / "out") == [*b"a", 256, *"déjà".encode(), 256]


@HAS_ARROW
def test_an_arrow_stream_without_its_end_is_cut_short(tmp_path):
    import pyarrow as pa

    src, table = tmp_path / "a.arrow", pa.table({"text": documents(2000)})
    with src.open("wb") as file:
        stream = pa.ipc.new_stream(file, table.schema)
        stream.write_table(table[:1000])
        end = file.tell()
        stream.write_table(table[1000:])
        stream.close()
    src.write_bytes(src.read_bytes()[:end])  # between two batches, where pyarrow notices nothing
    with pytest.raises(RunError, match=r"a\.arrow: the stream has no mark at its end: it is cut short; write it again"):
        prepared(src=str(src), dst=str(tmp_path / "out"), tokenizer="bytes", workers=1)


def test_a_killed_worker_ends_prepare_with_a_message(tmp_path, monkeypatch):
    src = jsonl(tmp_path / "a.jsonl", documents(3000))
    monkeypatch.setattr("launcher.process_pool.CODE", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RunError) as error:
        prepared(src=str(src), dst=str(tmp_path / "out"), tokenizer="bytes", workers=1)
    text = "a process that encodes was killed; the system kills processes when memory runs out"
    assert str(error.value) == text
    assert not Path(tmp_path / "out").exists()
