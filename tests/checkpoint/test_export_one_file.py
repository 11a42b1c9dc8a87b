from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from launcher.checkpoint import export, read_full
from launcher.checkpoint.store import fresh
from launcher.checkpoint.tensorfile.safetensors import Blob
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import files, filled, save, small, strategies, tensors, write_file


@pytest.fixture
def src(tmp_path: Path) -> Path:
    save(tmp_path / "a", small(), filled(small()))
    return tmp_path / "a"


def test_the_library_reads_an_export_tied_tensors_once(src: Path, tmp_path: Path) -> None:
    path = tmp_path / "exports" / "model.safetensors"
    report = export(src, path)
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == ["embed.weight", "layer.mean", "layer.weight"]
        assert file.metadata() == {"format": "pt", "launcher.aliases": json.dumps({"head.weight": "embed.weight"})}
        got = file.get_tensor("embed.weight")
    np.testing.assert_array_equal(
        got.view(np.uint8).reshape(-1), np.frombuffer(filled(small())["embed.weight"], np.uint8)
    )
    assert (report.path, report.files, report.bytes_written) == (path, 1, path.stat().st_size)
    assert report.bytes_read == 6 * 4 * 4 + 5 * 3 * 2 + 3 * 4
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_reading_gives_every_name_in_memory_that_may_be_changed_without_changing_the_file(
    src: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    export(src, path)
    before = path.read_bytes()
    full = read_full(path)
    assert sorted(full) == ["embed.weight", "head.weight", "layer.mean", "layer.weight"]
    assert len(full) == 4
    full["head.weight"].data[:4] = b"\0\0\0\0"
    assert bytes(full["embed.weight"].data[:4]) == b"\0\0\0\0"  # tied here too
    assert path.read_bytes() == before
    assert bytes(read_full(path)["head.weight"].data) == filled(small())["embed.weight"]


def test_a_safetensors_file_there_is_replaced(src: Path, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"old": Blob.of("bool", (), b"a")}, {})
    export(src, tmp_path / "model.safetensors")
    assert len(read_full(tmp_path / "model.safetensors")) == 4


def test_a_file_of_the_users_with_the_name_of_one_that_is_being_written_stays(src: Path, tmp_path: Path) -> None:
    names = ("full.safetensors.partial", "full.partial.safetensors")
    for name in names:
        (tmp_path / name).write_text("mine")
    export(src, tmp_path / "full.safetensors")
    assert [(tmp_path / name).read_text() for name in names] == ["mine", "mine"]
    assert {p.name for p in tmp_path.iterdir()} == {"a", "latest", "full.safetensors", *names}


@pytest.mark.parametrize("suffix", ["partial", "trash"])
def test_a_folder_of_the_users_with_the_name_of_one_that_is_being_written_stays(tmp_path: Path, suffix: str) -> None:
    mine = tmp_path / f"a.{suffix}/mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    for content in ("old", "new"):
        with fresh(tmp_path / "a") as new:
            (new / "file").write_text(content)
    assert mine.read_text() == "mine"
    assert (tmp_path / "a/file").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", f"a.{suffix}"]


def test_no_checkpoint_and_no_file_of_another_kind_is_written_over(src: Path, tmp_path: Path) -> None:
    before = files(src)
    for path in (src / "rank_0/model.safetensors", src / "new/model.safetensors"):
        text = f"{path}: the destination is inside the checkpoint {src}; give one outside it"
        assert refusal(lambda at=path: export(src, at)) == text  # type: ignore[misc]
    assert files(src) == before
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("all of it")
    text = f"{thesis}: this is not a safetensors file, so it is not replaced"
    assert refusal(lambda: export(src, thesis), FileExistsError) == text
    assert thesis.read_text() == "all of it"


def test_a_folder_is_no_file_name(src: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        export(src, src)
    assert str(caught.value) == f"{src}: a folder, but the export is one file; give a file name in it"


def test_files_of_others_are_read_too(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"x": np.arange(3.0)}, tmp_path / "x.safetensors")
    assert bytes(read_full(tmp_path / "x.safetensors")["x"].data) == np.arange(3.0).tobytes()


@pytest.mark.parametrize(
    ("aliases", "text"),
    [
        ("{", "launcher.aliases is not JSON"),
        ("[1]", "launcher.aliases is not a mapping of names to names"),
        ('{"a": "z"}', "launcher.aliases names tensors that do not exist: z"),
    ],
)
def test_bad_aliases_are_refused(tmp_path: Path, aliases: str, text: str) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"x": Blob.of("bool", (), b"a")}, {"launcher.aliases": aliases})
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_full(path)
    assert str(caught.value) == f"{path}: {text}"


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_an_export_holds_every_parameter_and_buffer_whole_under_every_name(data: st.DataObject) -> None:
    a = data.draw(strategies(data.draw(tensors())))
    full = filled(a)
    with TemporaryDirectory() as made:
        save(Path(made) / "a", a, full)
        export(Path(made) / "a", Path(made) / "model.safetensors")
        got = {name: bytes(blob.data) for name, blob in read_full(Path(made) / "model.safetensors").items()}
    model = a.only("param", "buffer")
    assert got == {name: full[first] for name, first in model.named.items()}
