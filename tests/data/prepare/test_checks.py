"""What is refused before a file is read to the end and before anything is written: exit code 2."""

from __future__ import annotations

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.__main__ import main as launcher
from launcher.data.prepare import corpus_formats
from launcher.data.prepare.__main__ import main
from launcher.data.prepare.prepare import problems
from launcher.job.schema.steps import Prepare
from launcher.optional import install_command
from tests.data.prepare.corpora import END, expected, jsonl, tokenizer, tokens

KEY = "steps.prepare"
READ = ".txt, .text, .jsonl, .ndjson, .json (one object per line), each also with .gz or .zst, .parquet, .arrow"


def problem_texts(tmp_path: Path, **settings) -> list[str]:
    """The problems, with paths relative to the folder of the test."""
    asked = {"src": str(tmp_path / "a.jsonl"), "dst": str(tmp_path / "out"), "tokenizer": "bytes", **settings}
    if "tokenizer_file" in settings:
        asked["tokenizer"] = "file"
    before = sorted(tmp_path.rglob("*"))
    texts = [str(problem).replace(f"{tmp_path}/", "") for problem in problems(Prepare(**asked), KEY)]
    assert sorted(tmp_path.rglob("*")) == before
    return texts


FILES = {
    "none": (None, "a.jsonl: No such file or directory"),
    "of another kind": (("a.csv", b"a,b"), f"a.csv: unknown format by its name: {READ} are read; "
                        "set format=text or format=jsonl"),
    "empty": (("a.txt", b""), "a.txt: empty, so there is nothing to tokenize"),
    "packed, by its bytes": (("a.jsonl", gzip.compress(b"{}")), "a.jsonl: jsonl by its name, but gzip by its first "
                             "bytes"),
    "packed, by its name": (("a.txt.gz", b"text"), "a.txt.gz: gzip by its name, but its first bytes are not of this "
                            "format"),
    "a damaged pack": (("a.jsonl.gz", b"\x1f\x8b\x08\x00rest of it"), "a.jsonl.gz: cannot be unpacked: Error -3 while "
                       "decompressing data: invalid block type"),
    "a packed table": (("a.parquet.gz", gzip.compress(b"")), "a.parquet.gz: parquet compressed as .gz: unpack it "
                       "first"),
    "UTF-16 without a mark": (("a.txt", "all of it is ASCII".encode("utf-16-le")), "a.txt: byte 1 is NUL, so it is not "
                              "plain text: write the text to a UTF-8 file first"),
    "an array": (("a.json", b'[\n{"text": "a"}]'), "a.json:1: not JSON: Expecting value at character 1"),
    "another key": (("a.jsonl", b'\n{"id": 1, "content": "a"}'), "a.jsonl:2: no key 'text' (keys: id, content) (try: "
                    "steps.prepare.field=content)"),
    "several keys": (("a.jsonl", b'{"title": "a", "content": "a"}\n{"text": 1}'), "a.jsonl:1: no key 'text' (keys: "
                     "title, content)"),
    "some bad lines": (("a.jsonl", b'{"content": "a"}\n{"text": "a"}'), "a.jsonl:1: no key 'text' (keys: content) "
                       "(try: steps.prepare.on_bad=skip)"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_prepared_is_named_with_why(tmp_path, case):
    file, text = FILES[case]
    if file is None:
        assert problem_texts(tmp_path) == [f"steps.prepare.src: {text}"]
        return
    (tmp_path / file[0]).write_bytes(file[1])
    assert problem_texts(tmp_path, src=str(tmp_path / file[0])) == [f"steps.prepare.src: {text}"]


def test_every_file_of_a_folder_is_looked_at_and_of_kinds_that_are_read(tmp_path):
    (tmp_path / "in").mkdir()
    assert problem_texts(tmp_path, src=str(tmp_path / "in"))[0].startswith("steps.prepare.src: ")
    (tmp_path / "in/README.md").write_text("no data")
    for name in "ab":
        (tmp_path / f"in/{name}.jsonl").write_text('{"no": 1}\n')
    texts = problem_texts(tmp_path, src=str(tmp_path / "in"))
    assert [text.partition(" no key")[0] for text in texts] == [
        "steps.prepare.src: in/a.jsonl:1:", "steps.prepare.src: in/b.jsonl:1:"
    ]  # fmt: skip
    assert problem_texts(tmp_path, src=str(tmp_path / "in"), on_bad="skip") == []


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_a_table_has_the_column_and_it_has_text(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    src = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"id": [1], "content": ["a"]}), src)
    text = "steps.prepare.src: a.parquet: no column 'text' (columns: id, content) (try: steps.prepare.field=content)"
    assert problem_texts(tmp_path, src=str(src)) == [text]
    assert problem_texts(tmp_path, src=str(src), field="id") == [
        "steps.prepare.src: a.parquet: column 'id' has int64, not text (try: steps.prepare.field=content)"
    ]
    double = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    parquet.write_table(double, src)
    text = "steps.prepare.src: a.parquet: 2 columns are named 'text': rename all but the one to read"
    assert problem_texts(tmp_path, src=str(src)) == [text]
    src.write_bytes(src.read_bytes()[:-20])
    assert problem_texts(tmp_path, src=str(src))[0].startswith(
        "steps.prepare.src: a.parquet: cannot be read: Parquet magic"
    )


@pytest.mark.parametrize(
    ("name", "head", "need"), [("a.parquet", b"PAR1", "pyarrow"), ("a.txt.zst", b"\x28\xb5\x2f\xfd", "zstandard")]
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch, name, head, need):
    monkeypatch.setattr(corpus_formats, "find_spec", lambda module: None)
    (tmp_path / name).write_bytes(head)
    text = f"the package {need}, which reads it, is not installed: {install_command('data')}"
    assert problem_texts(tmp_path, src=str(tmp_path / name))[0] == f"steps.prepare.src: {name}: {text}"


def test_an_unknown_end_of_document_token_is_refused(tmp_path):
    file = tokenizer(tmp_path)
    jsonl(tmp_path / "a.jsonl", ["a"])
    assert problem_texts(tmp_path, tokenizer_file=str(file)) == []
    assert problem_texts(tmp_path, tokenizer_file=str(file), end_of_document="<eos>") == [
        f"steps.prepare.end_of_document: <eos>: tokenizer.json has no such token; its special tokens: {END}"
    ]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>"}))
    text = "null: tokenizer_config.json names </s>, which tokenizer.json lacks"
    assert problem_texts(tmp_path, tokenizer_file=str(file)) == [
        f"steps.prepare.end_of_document: {text}; its special tokens: {END}"
    ]
    config.unlink()
    text = "null: tokenizer.json has no tokenizer_config.json with an eos_token next to it"
    text += "; name the token that ends a document"
    assert problem_texts(tmp_path, tokenizer_file=str(file)) == [
        f"steps.prepare.end_of_document: {text}; its special tokens: {END}"
    ]
    file.write_text("{}")
    assert problem_texts(tmp_path, tokenizer_file=str(file))[0].startswith(
        "steps.prepare.tokenizer_file: tokenizer.json: not a"
    )


def test_a_folder_that_prepare_did_not_make_is_not_replaced(tmp_path):
    jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "out").mkdir()
    assert problem_texts(tmp_path) == []
    (tmp_path / "out/mine").write_text("")
    assert problem_texts(tmp_path, overwrite=True) == [
        "steps.prepare.dst: out: it is not empty, but prepare did not make it; give another folder"
    ]


@pytest.mark.parametrize("manifest", ["{}", '{"tokens": "6"}', "[]", "{"])
def test_a_folder_whose_manifest_somebody_edited_is_not_replaced(tmp_path, manifest):
    words = [f"src={jsonl(tmp_path / 'a.jsonl', ['one'])}", f"dst={tmp_path}/out", "tokenizer=bytes", "workers=1"]
    assert main(words) == 0
    (tmp_path / "out/prepared.json").write_text(manifest)
    why = "it is not empty, but prepare did not make it; give another folder"
    assert problem_texts(tmp_path, overwrite=True) == [f"steps.prepare.dst: out: {why}"]
    assert main(words) == 2


def test_tokens_of_another_corpus_or_of_other_settings_are_refused_before_anything_starts(tmp_path, monkeypatch):
    src = jsonl(tmp_path / "a.jsonl", ["one", "two"])
    words = [f"src={src}", f"dst={tmp_path}/out", "tokenizer=bytes", "workers=1"]
    assert main(words) == 0
    assert problem_texts(tmp_path) == []

    # other settings, and the same settings for another corpus
    way = "name another folder, or set steps.prepare.overwrite=true to replace it"
    text = f"steps.prepare.dst: out: it was made from another corpus, or with other settings; {way}"
    assert problem_texts(tmp_path, shard_tokens=7) == [text]
    jsonl(src, ["one", "six"])
    assert problem_texts(tmp_path) == [text]
    assert problem_texts(tmp_path, overwrite=True) == []

    # a plan does not read a large corpus: it compares only what is cheap
    monkeypatch.setattr("launcher.data.prepare.prepare.READ_BY_PLAN", 1)
    assert problem_texts(tmp_path) == []
    assert problem_texts(tmp_path, shard_tokens=7) == [text]
    jsonl(src, ["one", "seven"])
    assert problem_texts(tmp_path) == [text]
    assert main(words) == 2


def test_the_command_reports_all_problems_at_once_with_cures_that_it_accepts(tmp_path, capsys):
    jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": "a"}')
    words = [f"src={tmp_path}/a.jsonl", f"dst={tmp_path}/a.jsonl", "tokenizer=bytes"]
    assert main(words) == 2
    assert (
        capsys.readouterr().err
        == f"""error: 2 problems in this request; nothing was started

  steps.prepare.src: {tmp_path}/a.jsonl:1: 'text' is a number, not text
    set by: steps.prepare.src={tmp_path}/a.jsonl (command line)
    try:    steps.prepare.on_bad=skip

  steps.prepare.dst: {tmp_path}/a.jsonl: it is a file, not a folder; give another folder
    set by: steps.prepare.dst={tmp_path}/a.jsonl (command line)
"""
    )
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": "a"}')
    assert main([*words, f"dst={tmp_path}/out", "steps.prepare.on_bad=skip"]) == 0
    end = "each ended by end of document, 1 bad lines left out"
    assert capsys.readouterr().out.startswith(f"{tmp_path}/out: 2 tokens (ids below 257) of 1 documents, {end}; ")
    assert main(["--help"]) == 0
    assert "on_bad: error" in capsys.readouterr().out


def test_prepare_runs_as_a_step_of_a_run(tmp_path, capsys):
    file, src = tokenizer(tmp_path), jsonl(tmp_path / "a.jsonl", ["one", "two"])
    words = ["recipe=lm_single", "steps=[prepare]", f"{KEY}.src={src}", f"{KEY}.dst={tmp_path}/out"]
    words += [f"{KEY}.tokenizer_file={file}", f"{KEY}.workers=1", f"run_dir={tmp_path}/run"]
    assert launcher(words) == 0
    assert tokens(tmp_path / "out") == expected(file, ["one", "two"])
    assert f"prepare: {tmp_path}/out: 6 tokens (ids below 600) of 2 documents" in capsys.readouterr().out
    assert '"prepared_tokens": 6' in (tmp_path / "run/status.json").read_text()
    assert launcher([*words, f"{KEY}.src={tmp_path}/b.csv", f"run_dir={tmp_path}/other"]) == 2
    assert not (tmp_path / "other").exists()
