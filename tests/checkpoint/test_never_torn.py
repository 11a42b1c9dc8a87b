from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checkpoint import (
    Entry,
    Strategy,
    latest,
    partial,
    prune,
    single,
    step_folder,
    transform,
    verify,
    write_rank,
)
from launcher.checkpoint.tensorfile import disk as durable
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.dying import killed, moments
from tests.checkpoint.saving import blobs_of_rank, files, filled, save, small
from tests.mounts import unmount
from tests.tiers import ALL


@pytest.fixture(autouse=True)
def page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not sync: what a process has written outlives it even before it is on the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def deaths(home: Path, act: Callable[[], None], count: int = 15) -> Iterator[None]:
    """Each turn has ``home`` as ``act`` leaves it when it is killed at a moment chosen at random."""
    before = home.with_name("before")
    shutil.copytree(home, before)
    total = moments(act)
    for moment in sorted({1, total, *random.Random(0).sample(range(1, total + 1), min(count, total))}):
        shutil.rmtree(home)
        shutil.copytree(before, home)
        killed(act, moment)
        yield


def other() -> Strategy:
    """The tensors of ``small``, in rows over four ranks."""
    grid = Grid.of(dp_shard=4)
    entries = small().entries.items()
    return Strategy(grid, {n: replace(e, layout=flat(grid, e.layout.shape)) for n, e in entries})


def flat(grid: Grid, shape: tuple[int, ...]) -> Layout:
    return Layout(grid, shape, (("dp_shard",), *((),) * (len(shape) - 1)) if shape else ())


def made(home: Path, act: Callable[[], None]) -> dict[str, bytes]:
    """The files that ``act`` makes of ``home`` if nothing stops it; ``home`` is restored."""
    before = home.with_name("first")
    shutil.copytree(home, before)
    act()
    after = files(home)
    shutil.rmtree(home)
    before.rename(home)
    return after


def test_a_transform_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    src, dst = tmp_path / "src" / "a", tmp_path / "out" / "b"
    save(src, small(), filled(small(), 1), {"step": 1})
    save(dst, small(), filled(small(), 2), {"step": 2})
    (dst.parent / "latest").unlink()

    def act() -> None:
        transform(src, dst, other(), overwrite=True)

    old, new = files(dst.parent), made(dst.parent, act)
    seen = []
    for _ in deaths(dst.parent, act, 100):
        assert verify(dst) == []
        found = {f"b/{name}": data for name, data in files(dst).items()}
        assert found in (old, new)
        seen.append(found == new)
        act()
        assert files(dst.parent) == new
    assert len(seen) >= 100
    assert {*seen} == {False, True}


def test_a_first_transform_killed_at_any_moment_leaves_no_checkpoint_or_a_complete_one(tmp_path: Path) -> None:
    src, dst = tmp_path / "src" / "a", tmp_path / "out" / "b"
    save(src, small(), filled(small(), 1), {"step": 1})
    dst.parent.mkdir()
    target = single(small())
    new = made(dst.parent, lambda: void(transform(src, dst, target)))
    for _ in deaths(dst.parent, lambda: void(transform(src, dst, target))):
        if dst.exists():
            assert verify(dst) == []
        else:
            transform(src, dst, target)
        assert files(dst.parent) == new


@pytest.mark.parametrize(
    ("step", "count"), [(1, 15), (2, 100 if ALL else 30), (3, 15)], ids=["older", "again", "newer"]
)
def test_a_save_killed_at_any_moment_leaves_the_last_checkpoint_or_the_new_one(
    tmp_path: Path, step: int, count: int
) -> None:
    home = tmp_path / "checkpoints"
    save(step_folder(home, 2), small(), filled(small(), 2), {"step": 2})

    def act() -> None:
        save(step_folder(home, step), small(), filled(small(), 9), {"step": 9})
        prune(home, 1)

    old, new = files(step_folder(home, 2)), files_of_step(made(home, act), step)
    seen = []
    for _ in deaths(home, act, count):
        last = latest(home)
        assert last is not None
        assert verify(last) == []
        assert files(last) in (old, new)
        seen.append(files(last) == new)
        act()
        assert latest(home) == step_folder(home, step)
        assert {p.name for p in home.iterdir()} == {"latest", f"step-00000{step}"}
        assert files(step_folder(home, step)) == new
    assert len(seen) >= count
    assert {*seen} == {False, True}


def files_of_step(found: dict[str, bytes], step: int) -> dict[str, bytes]:
    head = f"step-00000{step}/"
    return {name.removeprefix(head): data for name, data in found.items() if name.startswith(head)}


def test_where_folders_cannot_be_swapped_the_old_one_is_whole_beside_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.checkpoint.tensorfile.disk._swapped", lambda a, b: False)
    src, dst = tmp_path / "src" / "a", tmp_path / "out" / "b"
    save(src, small(), filled(small(), 1), {"step": 1})
    transform(src, dst, small())

    def act() -> None:
        transform(src, dst, single(small()), overwrite=True)

    new = made(dst.parent, act)
    for _ in deaths(dst.parent, act):
        assert verify(dst if dst.exists() else dst.with_name(".b.trash")) == []
        act()
        assert files(dst.parent) == new


def test_files_are_synced_before_the_manifest_and_the_manifest_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    publish = durable.publish

    def published(new: Path, final: Path) -> None:
        seen.append("its name")
        publish(new, final)

    home = tmp_path / "checkpoints"
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(synced(fd, home)))
    monkeypatch.setattr("launcher.checkpoint.store.publish", published)
    save(step_folder(home, 1), small(), filled(small()), {"step": 1})
    new = "step-000001.partial"
    manifest, name = seen.index(f"{new}/manifest.json"), seen.index("its name")
    written = {f"{new}/{path}" for path in files(step_folder(home, 1)) if path != "manifest.json"}
    folders = {new, *(f"{new}/{p.name}" for p in step_folder(home, 1).iterdir() if p.is_dir())}
    assert written | folders <= {*seen[:manifest]}
    assert seen[manifest + 1 : name] == [new]
    assert seen[name + 1 :] == [".", "latest", "."]


def test_a_transform_syncs_behind_its_writing_and_all_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append((synced(fd, tmp_path), threading.get_ident())))
    save(tmp_path / "a", small(), filled(small()))
    seen.clear()
    transform(tmp_path / "a", tmp_path / "b", other())
    before = dict(seen[: [path for path, _ in seen].index(".b.partial/manifest.json")])
    tensors = {f".b.partial/{path}" for path in files(tmp_path / "b") if path.startswith("rank_")}
    folders = {f".b.partial/rank_{rank}" for rank in range(4)}
    assert before.keys() > tensors | folders | {".b.partial", ".b.partial/state.json"}
    assert len({before[path] for path in tensors | folders}) == 1
    # the writing thread waits for this one
    assert before[".b.partial/rank_0"] != before[".b.partial/strategy/stage0.json"]


def test_a_sync_that_fails_fails_the_transform_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", small(), filled(small()))

    def broken(fd: int) -> None:
        if synced(fd, tmp_path) == ".b.partial/rank_0/optimizer.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        transform(tmp_path / "a", tmp_path / "b", other())
    assert caught.value.filename == str(tmp_path / ".b.partial/rank_0/optimizer.safetensors")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("b")]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, None], ids=["file system", "kernel", "library"])
def test_where_room_cannot_be_taken_in_advance_files_are_written_all_the_same(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            if code is not None:
                self.fallocate = lambda *_: -1

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr("ctypes.get_errno", lambda: code)
    save(tmp_path / "a", small(), filled(small()))
    assert verify(tmp_path / "a") == []


def synced(fd: int, home: Path) -> str:
    """The file or folder behind ``fd``; a new text file has its final name."""
    path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(home)
    new_text = path.name.startswith(".") and path.suffix != ".partial"
    return str(path.with_name(path.name[1:].rpartition(".")[0]) if new_text else path)


def void(_: object) -> None:
    """Discard a value in a lambda."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "launcher-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small file system to fill: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        unmount(folder)


def large() -> Strategy:
    grid = Grid.of(dp_shard=2)
    return Strategy(grid, {"w": Entry(Layout(grid, (1 << 16,), (("dp_shard",),)), "float32")})


def test_a_transform_to_a_full_disk_says_what_was_needed_and_leaves_nothing(tmp_path: Path, disk: Path) -> None:
    save(tmp_path / "a", large(), filled(large()))
    size = (tmp_path / "a" / "rank_1" / "model.safetensors").stat().st_size
    with pytest.raises(OSError, match="No space") as caught:
        transform(tmp_path / "a", disk / "b", large())
    path = disk / ".b.partial" / "rank_1" / "model.safetensors"
    left = (256 << 10) - -(-size // 4096) * 4096 - 4096  # rank 0 has its file and the strategy file there
    assert str(caught.value) == (f"{path}: No space left on device: the file needs {size} bytes, {left} are free")
    assert files(disk) == {}
    assert not any(disk.iterdir())


def test_a_rank_that_fills_the_disk_takes_back_what_it_wrote(tmp_path: Path, disk: Path) -> None:
    final = step_folder(disk, 1)
    write_rank(partial(final), 0, large(), blobs_of_rank(large(), 0, filled(large())))
    with pytest.raises(OSError, match="No space"):
        write_rank(partial(final), 1, large(), blobs_of_rank(large(), 1, filled(large())))
    assert [p.name for p in partial(final).glob("rank_*")] == ["rank_0"]
    assert latest(disk) is None


def test_where_the_destination_is_a_link_the_folder_that_it_leads_to_is_written(tmp_path: Path) -> None:
    save(tmp_path / "src", small(), filled(small()))
    for name, there in (("empty", "disk"), ("dangling", "later")):
        (tmp_path / name).symlink_to(there)
    (tmp_path / "disk").mkdir()
    for name, there in (("empty", "disk"), ("dangling", "later")):
        transform(tmp_path / "src", tmp_path / name, single(small()))
        assert (tmp_path / name).is_symlink()
        assert verify(tmp_path / there) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "disk", "empty", "later", "latest", "src"]
