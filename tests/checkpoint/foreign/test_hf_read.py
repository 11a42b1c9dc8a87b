from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from launcher.checkpoint import Blob, import_full, read_hf, single, transform, verify, write_hf
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import files, filled, save, small, strategies, tensors, write_file

INDEX = "model.safetensors.index.json"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    save(tmp_path / "src" / "a", small(), filled(small()))
    return tmp_path / "src" / "a"


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_checkpoint_through_a_hugging_face_folder_is_the_same_bytes(data: st.DataObject) -> None:
    a = data.draw(strategies(data.draw(tensors())))
    model = a.only("param", "buffer")
    if not model.entries:
        return
    size = data.draw(st.sampled_from([1, 100, 10_000]))
    with TemporaryDirectory() as made:
        home = Path(made)
        save(home / "a", model, filled(model), {"step": 3})
        write_hf(home / "a", home / "hf", names={"": "model"}, max_shard_size=size)
        import_full(read_hf(home / "hf", {"model": ""}), home / "b", model, {"step": 3})
        assert verify(home / "b") == []
        assert files(home / "b") == files(home / "a")


def test_one_file_as_transformers_writes_it(src: Path, tmp_path: Path) -> None:
    report = write_hf(src, tmp_path / "hf")
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="numpy") as file:
        assert sorted(file.keys()) == ["embed.weight", "layer.mean", "layer.weight"]
        assert file.metadata() == {"format": "pt"}
    assert (report.path, report.files, report.left) == (tmp_path / "hf", 1, ())


def test_shards_and_their_index_as_transformers_writes_them(src: Path, tmp_path: Path) -> None:
    report = write_hf(src, tmp_path / "hf", max_shard_size=40)  # 96, 30 and 12 bytes
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [first, second, third, INDEX]
    assert json.loads((tmp_path / "hf" / INDEX).read_text()) == {
        "metadata": {"total_size": 138},
        "weight_map": {"embed.weight": first, "layer.mean": third, "layer.weight": second},
    }
    assert report.files == 3
    assert report.bytes_written == sum(p.stat().st_size for p in (tmp_path / "hf").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("size", "count"), [("42B", None), ("138", None), (42, 2), ("0.042KB", 2), ("1 kib", 1), ("5GB", 1), (138, 1)]
)
def test_a_shard_is_at_most_its_size(src: Path, tmp_path: Path, size: int | str, count: int | None) -> None:
    if count is None:
        text = f"max_shard_size: {size!r} is not a size; give bytes, or text such as 2GiB"
        if size == "138":
            write_hf(src, tmp_path / "hf", max_shard_size=size)
        else:
            assert refusal(lambda: write_hf(src, tmp_path / "hf", max_shard_size=size)) == text
    else:
        assert write_hf(src, tmp_path / "hf", max_shard_size=size).files == count


def test_names_without_a_row_are_refused_or_left_out_and_listed(src: Path, tmp_path: Path) -> None:
    table = {"embed": "model.embed_tokens"}
    text = (
        "names: no row of the table matches layer.weight, layer.mean; "
        "add rows, with null to leave a tensor out, or strict: false"
    )
    assert refusal(lambda: write_hf(src, tmp_path / "hf", names=table)) == text
    assert not (tmp_path / "hf").exists()
    assert write_hf(src, tmp_path / "hf", names=table, strict=False).left == ("layer.weight", "layer.mean")
    assert list(read_hf(tmp_path / "hf")) == ["model.embed_tokens.weight"]
    nothing = f"names: no tensor of {src} is left to write; the table leaves all of them out"
    assert refusal(lambda: write_hf(src, tmp_path / "none", names={"": None})) == nothing


def test_reading_leaves_out_what_the_table_does_not_match_and_lists_it(src: Path, tmp_path: Path) -> None:
    write_hf(src, tmp_path / "hf")
    got = read_hf(tmp_path / "hf", {"embed": "e"}, strict=False)
    assert (list(got), len(got), got.unmatched) == (["e.weight"], 1, ("layer.mean", "layer.weight"))
    assert bytes(got["e.weight"].data) == filled(small())["embed.weight"]
    assert got.specs == {"e.weight": small().entries["embed.weight"].spec}


def test_files_beside_the_model_come_along_and_may_be_overwritten(src: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    write_hf(src, tmp_path / "hf", beside=[config])
    write_hf(src, tmp_path / "hf", beside=[config], max_shard_size=40, overwrite=True)
    assert sorted(p.name for p in (tmp_path / "hf").glob("*.json")) == ["config.json", INDEX]
    assert not (tmp_path / "hf" / "model.safetensors").exists()


def test_a_folder_with_other_files_is_never_overwritten(src: Path, tmp_path: Path) -> None:
    write_hf(src, tmp_path / "hf")
    dst = tmp_path / "hf"
    text = f"{dst}: the destination is not empty; give another, or set overwrite: true"
    assert refusal(lambda: write_hf(src, dst), FileExistsError) == text
    (dst / "thesis.tex").touch()
    text = f"{dst}: the destination is not empty and not a folder with only a model, so it is never overwritten"
    assert refusal(lambda: write_hf(src, dst, overwrite=True), FileExistsError) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [("absent.json", "cannot be copied into the model's folder: no such file"),
     (INDEX, f"cannot be copied into the model's folder: it has another {INDEX}")],
)  # fmt: skip
def test_files_beside_the_model_are_checked_first(src: Path, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    if name == INDEX:
        path.touch()
    assert refusal(lambda: write_hf(src, tmp_path / "hf", beside=[path])) == f"{path}: {text}"


def sharded(folder: Path) -> dict[str, Any]:
    """Two shards of one tensor each, and their index, which is returned."""
    folder.mkdir()
    for i, name in enumerate("ab", 1):
        write_file(folder / f"{i}.safetensors", {name: Blob.of("int8", (1,), b"x")}, {})
    index = {"metadata": {"total_size": 2}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def to(file: str, name: str = "b") -> Callable[[Path, dict[str, Any]], None]:
    def act(folder: Path, index: dict[str, Any]) -> None:
        index["weight_map"][name] = file

    return act


def copied(folder: Path, index: dict[str, Any]) -> None:
    both = {name: Blob.of("int8", (1,), b"x") for name in "ab"}
    write_file(folder / "2.safetensors", both, {})


BAD: dict[str, tuple[Callable[[Path, dict[str, Any]], Any], str]] = {
    "parent": (to("../2.safetensors"), "../2.safetensors is not the name of a .safetensors file in this folder"),
    "absolute": (to("/etc/passwd"), "/etc/passwd is not the name of a .safetensors file in this folder"),
    "pickle": (to("2.bin"), "2.bin is not the name of a .safetensors file in this folder"),
    "missing": (to("3.safetensors"), "shard 3.safetensors is missing"),
    "two shards": (copied, "tensor a is in 1.safetensors and in 2.safetensors"),
    "absent": (to("2.safetensors", "c"), "tensor c is not in 2.safetensors"),
    "elsewhere": (to("1.safetensors"), "tensor b is not in 1.safetensors"),
    "unlisted": (lambda folder, index: index.update(weight_map={"a": "1.safetensors"}) or write_file(
        folder / "1.safetensors", {n: Blob.of("int8", (1,), b"x") for n in "az"}, {}),
        "tensor z of 1.safetensors is not listed"),
    "no map": (lambda folder, index: index.pop("weight_map"),
               "weight_map is not a mapping of tensor names to file names"),
    "empty map": (lambda folder, index: index.update(weight_map={}),
                  "weight_map is not a mapping of tensor names to file names"),
    "no text": (lambda folder, index: index.update(weight_map={"a": 1}),
                "weight_map is not a mapping of tensor names to file names"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "hf"
    index = sharded(folder)
    act, text = BAD[case]
    act(folder, index)
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(lambda: read_hf(folder)) == f"{folder / INDEX}: {text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [("{", "not JSON"), ("[]", "weight_map is not a mapping of tensor names to file names"),
     ('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "a is listed twice")],
)  # fmt: skip
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, content: str, text: str) -> None:
    sharded(tmp_path / "hf")
    (tmp_path / "hf" / INDEX).write_text(content)
    assert refusal(lambda: read_hf(tmp_path / "hf")) == f"{tmp_path / 'hf' / INDEX}: {text}"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    assert refusal(lambda: read_hf(folder)) == f"{folder}: no such folder"
    folder.mkdir()
    assert refusal(lambda: read_hf(folder)) == f"{folder}: it has neither model.safetensors nor {INDEX}"
    (folder / "pytorch_model.bin").touch()
    text = f"{folder}: it has only pickles, which are never loaded (pytorch_model.bin); save safetensors"
    assert refusal(lambda: read_hf(folder)) == text
    shutil.rmtree(folder)
    sharded(folder)
    (folder / "1.safetensors").rename(folder / "model.safetensors")
    text = f"{folder}: both model.safetensors and {INDEX} exist and may differ; remove one of them"
    assert refusal(lambda: read_hf(folder)) == text


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path / "hf")
    path = tmp_path / "hf" / "2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    text = f"{path}: truncated: its tensors end at byte {size + 1}, the file has {size}"
    assert refusal(lambda: read_hf(tmp_path / "hf")) == text


def test_a_damaged_source_leaves_no_folder(src: Path, tmp_path: Path) -> None:
    path = src / "rank_2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert refusal(lambda: write_hf(src, tmp_path / "hf")).startswith(f"{path}: tensor layer.weight is damaged: ")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_a_transformed_checkpoint_gives_the_same_folder(src: Path, tmp_path: Path) -> None:
    transform(src, tmp_path / "one", single(small()))
    write_hf(src, tmp_path / "x", max_shard_size=100)
    write_hf(tmp_path / "one", tmp_path / "y", max_shard_size=100)
    assert files(tmp_path / "x") == files(tmp_path / "y")
