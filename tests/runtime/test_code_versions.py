"""Which code a run used: what the run records, and what it reports when the code has changed."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher.runtime.code_versions import CodeVersions, as_json, changes, code_versions, package_version, read

OLD = CodeVersions("0.1", "3.11.9", "2.12.0", "/shared/me", "a" * 40, False, {"mine.model": "1" * 64})


def git(*words: str, cwd: Path) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@here"]
    done = subprocess.run(["git", *who, *words], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git("init", "--quiet", cwd=tmp_path)
    (tmp_path / "model.py").write_text("a = 1\n")
    git("add", "model.py", cwd=tmp_path)
    git("commit", "--quiet", "--message=first", cwd=tmp_path)
    return tmp_path


def test_a_commit_and_whether_it_is_what_is_there(repository: Path) -> None:
    head = git("rev-parse", "HEAD", cwd=repository)
    (repository / "notes").write_text("that git does not track\n")
    found = code_versions(repository, [])
    assert (found.commit, found.dirty) == (head, False)
    (repository / "model.py").write_text("a = 2\n")
    found = code_versions(repository, [])
    assert (found.commit, found.dirty) == (head, True)


@pytest.mark.parametrize("name", ["evil", "e.v=i l"])
@pytest.mark.parametrize("required", ["true", "false"])
def test_nothing_of_a_repository_is_run(repository: Path, name: str, required: str) -> None:
    """The repository may be a stranger's: its filters, its file monitor and its hooks are programs."""
    ran = repository.parent / "ran"
    evil = f"touch {ran}; cat"
    for words in (
        [f"filter.{name}.clean", evil], [f"filter.{name}.smudge", evil], [f"filter.{name}.process", evil],
        [f"filter.{name}.required", required], ["core.fsmonitor", evil], ["diff.external", evil],
    ):  # fmt: skip
        git("config", *words, cwd=repository)
    (repository / ".git/info/attributes").write_text(f"* filter={name}\n" if " " not in name else "* filter=x\n")
    for hook in ("post-index-change", "reference-transaction", "query-watchman"):
        file = repository / ".git/hooks" / hook
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{evil}\n")
        file.chmod(0o755)
    (repository / "model.py").write_text("a = 3\n")
    head = git("rev-parse", "HEAD", cwd=repository)
    ran.unlink(missing_ok=True)
    found = code_versions(repository, [])
    assert (found.commit, found.dirty) == (head, True)
    assert not ran.exists()


@pytest.mark.parametrize("began", [False, True], ids=["no repository", "no commit"])
def test_a_folder_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if began:
        git("init", "--quiet", cwd=tmp_path)
    found = code_versions(tmp_path, [])
    assert (found.commit, found.dirty) == (None, None)


def test_a_machine_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/nothing")
    found = code_versions(repository, [])
    assert (found.commit, found.dirty, found.torch) == (None, None, package_version("torch"))


def test_the_file_of_each_module_that_is_named_and_imported(tmp_path: Path) -> None:
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    found = code_versions(tmp_path, [f"{__name__}.CodeVersions", "nowhere.Model", "sys.path"])
    assert found.modules == {__name__: here}


def test_torch_need_not_be_imported() -> None:
    code = "import sys; from pathlib import Path; from launcher.runtime.code_versions import code_versions as v"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; v(Path(), []); print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (OLD, ""),
        (replace(OLD, folder="/elsewhere"), ""),
        (replace(OLD, modules={"other": "2"}), ""),
        (replace(OLD, torch="2.13.0"), "torch 2.12.0 -> 2.13.0"),
        (replace(OLD, dirty=True), "commit aaaaaaaaaa -> aaaaaaaaaa with changes"),
        (replace(OLD, commit=None, dirty=None), "commit aaaaaaaaaa -> none"),
        (
            replace(OLD, commit="b" * 40, modules={"mine.model": "2" * 64}),
            "commit aaaaaaaaaa -> bbbbbbbbbb, mine.model 1111111111 -> 2222222222",
        ),
    ],
    ids=["same", "folder", "other modules", "torch", "dirty", "no commit", "commit and module"],
)
def test_changed_code_is_reported_with_both_versions(now: CodeVersions, said: str) -> None:
    assert changes(OLD, now) == said


def test_a_record_of_versions_is_read_back_unchanged(tmp_path: Path) -> None:
    assert read(tmp_path) == ()
    both = (OLD, replace(OLD, commit=None, dirty=None, modules={}))
    (tmp_path / "versions.json").write_text(as_json(both))
    assert read(tmp_path) == both


WRONG = {
    "not JSON": "[",
    "no list": "1",
    "a mapping": str(asdict(OLD)).replace("'", '"').replace("False", "false"),
    "other keys": '[{"launcher": "1"}]',
    "no texts": as_json([OLD]).replace('"2.12.0"', "2"),
    "modules": as_json([OLD]).replace('"' + "1" * 64 + '"', "1"),
    "a list of modules": as_json([replace(OLD, modules={})]).replace("{}", '"m"'),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_file_that_is_damaged_counts_as_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "versions.json").write_text(text)
    assert read(tmp_path) == ()


def test_a_start_with_other_code_says_so_and_adds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from launcher.job.compose import compose
    from launcher.run.status_record import write_versions

    run = tmp_path / "run"
    run.mkdir()
    job = compose(["recipe=lm_single"]).job
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    write_versions(run, job, None)
    [now] = read(run)
    old = replace(now, torch="2.10.0")
    with caplog.at_level(logging.WARNING):
        write_versions(run, job, "done")
        assert (read(run), caplog.messages) == ((now,), [])
        (run / "versions.json").write_text(as_json([old]))
        write_versions(run, job, "submitted")
        write_versions(run, job, "running")
    told = f"torch 2.10.0 -> {now.torch}"
    assert caplog.messages == [f"the code of this run has changed since it was submitted: {told}"]
    assert read(run) == (old, now)
