"""Code that writes in run folders does so by ``watched_folder`` and ``disk``, which follow no links there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import launcher

ROOT = Path(launcher.__file__).parent
METHODS = {"mkdir", "write_text", "write_bytes", "unlink", "rmdir", "touch", "rename", "symlink_to", "rmtree",
           "makedirs", "copyfile", "copytree", "move", "copy2", "hardlink_to"}  # fmt: skip
"""Functions of ``pathlib``, ``os`` and ``shutil`` that change what a path leads to."""
OURS = ("disk", "shard_record")
"""Modules that have functions of these names."""

HARMLESS = ("os.O_RDONLY", "os.O_NOFOLLOW", "os.devnull", "open(fd,")

BY_PATH = {
    "checkpoint/store.py": "descriptors of os.fwalk, which follows no links",
    "checkpoint/tensorfile/disk.py": "paths that watched_folder has pinned",
    "checkpoint/tensorfile/watched_folder.py": "the functions themselves",
    "data/chat/tokens.py": "a folder of tokens: searched for links when it is locked",
    "data/prepare/lock.py": "a folder of tokens",
    "data/prepare/shard_record.py": "a folder of tokens",
    "data/tokens/formats.py": "a folder of tokens",
    "extras/k8s/k8s.py": "deletes a name in the run folder itself, before anything starts",
    "extras/loggers/sinks.py": "W&B's own folder, in which W&B writes by path",
    "extras/mindspore/functions.py": "functions that users call, without a run",
    "extras/starter/new_project.py": "a new project",
    "extras/sweep/cell_process.py": "deletes a name in the folder of a cell, which is no link",
    "extras/sweep/folder.py": "the folder of a sweep: searched for links before a cell starts",
    "run/external_ranks/shared_folder.py": "the probe of a shared file system, before the run folder exists",
    "runtime/cluster/messages.py": "the secret in the home of the user",
    "runtime/run_folder.py": "makes the run folder itself; the others by descriptors",
    "runtime/training/compile_cache.py": "the cache of compiled code",
}
"""The modules that write by path, and why no link in a run folder is followed there."""


def writes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        written = any(set(mode) <= set("wxabrt+") and set(mode) & set("wxa+") for mode in modes)
        by_path = (
            (name in METHODS and owner and owner not in OURS)
            or called in ("os.open", "os.replace", "os.remove", "os.symlink", "os.link")
            or (name == "open" and written and owner not in ("", "os", "io"))
            or (called == "open" and written and not isinstance(node.args[0], ast.Call) and modes[0] != "r")
        )
        text = ast.unparse(node)
        if by_path and not any(harmless in text for harmless in HARMLESS):
            yield f"{node.lineno}: {text[:80]}"


def test_only_these_modules_write_by_path():
    found = {str(path.relative_to(ROOT)): [*writes(path)] for path in sorted(ROOT.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines and name not in BY_PATH} == {}
    assert [name for name in BY_PATH if not found[name]] == []
