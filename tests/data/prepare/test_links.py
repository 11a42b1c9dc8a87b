"""Links in a folder in which ``prepare`` or a cache works: refused, because files there are deleted and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.data.prepare import lock, shard_record, text_cache
from launcher.data.prepare.__main__ import main
from launcher.data.prepare.progress import ProgressReporter
from launcher.errors import Problem, RequestError
from launcher.job.schema.data import Text
from launcher.untrusted.files import LINK, RefusedFile
from tests.data.prepare.corpora import TEXT, jsonl, tokenizer


@pytest.fixture
def mine(tmp_path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years")
    return folder


def plant(folder: Path, where: str, mine: Path) -> Path:
    """Make ``folder``, or a file or folder in it, a link to the user's files."""
    if where == ".":
        folder.symlink_to(mine)
        return folder
    folder.mkdir(parents=True)
    (folder / where).symlink_to(mine if where == "below" else mine / "thesis.txt")
    return folder / where


WHERE = [".", ".lock", "begun.json", ".begun.json.new", "00000.tokens", "below"]


@pytest.mark.parametrize("where", WHERE)
def test_a_link_where_prepare_works_is_refused_and_its_target_stays(where, tmp_path, mine, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "c.jsonl", ["a", "b"])
    link = plant(tmp_path / ".words.unfinished", where, mine)
    assert main(["src=c.jsonl", "dst=words", "tokenizer=bytes", "workers=1"]) == 2
    assert f"steps.prepare.dst: {link}: {LINK}" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"thesis.txt": "years"}
    assert not (tmp_path / "words").exists()

    # the way out
    link.unlink()
    assert main(["src=c.jsonl", "dst=words", "tokenizer=bytes", "workers=1"]) == 0


@pytest.mark.parametrize("where", [".", ".lock", "train.tokens"])
def test_a_link_in_a_cache_is_refused(where, tmp_path, mine):
    (tmp_path / "a.txt").write_text(TEXT[:1000])
    settings = Text(
        name="text", path=str(tmp_path / "a.txt"), seq_len=8, tokenizer="file", cache=str(tmp_path / "cache"),
        tokenizer_file=str(tokenizer(tmp_path)),
    )  # fmt: skip
    (tmp_path / "cache").mkdir()
    link = plant(shard_record.working_folder(text_cache._folder(settings)), where, mine)
    with pytest.raises(RequestError) as caught:
        text_cache.make(settings, print, ProgressReporter("off", print))
    assert caught.value.problems == (Problem("data.cache", f"{link}: {LINK}"),)
    assert [path.read_text() for path in mine.iterdir()] == ["years"]


def test_a_link_that_is_made_later_is_not_written_through(tmp_path, mine):
    with lock.locked(tmp_path / "work", print, "x"):
        (tmp_path / "work/.a.json.new").symlink_to(mine / "thesis.txt")
        with pytest.raises(RefusedFile):
            shard_record.write_json(tmp_path / "work/a.json", 1)
    assert (mine / "thesis.txt").read_text() == "years"
