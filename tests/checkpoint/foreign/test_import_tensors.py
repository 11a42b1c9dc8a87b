from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checkpoint import (
    Blob,
    Entry,
    Strategy,
    export,
    import_full,
    open_checkpoint,
    read_full,
    target_strategy,
    transform,
    verify,
)
from launcher.checkpoint.box_bytes import BUFFER
from launcher.checkpoint.foreign import import_checkpoint
from launcher.checkpoint.full_tensors import Blobs
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, files, filled, save, small


def model() -> Strategy:
    return small().only("param", "buffer")


def blobs() -> dict[str, Blob]:
    return {n: Blob.of(e.dtype, e.layout.shape, filled(model())[n]) for n, e in model().entries.items()}


def test_an_export_becomes_a_checkpoint_of_any_layout(tmp_path: Path) -> None:
    save(tmp_path / "a", model(), filled(model()), {"step": 4})
    export(tmp_path / "a", tmp_path / "model.safetensors")
    target = target_strategy(model(), nproc=6, stages=2, shard_size=3)
    report = import_full(read_full(tmp_path / "model.safetensors"), tmp_path / "b", target, {"step": 4})
    transform(tmp_path / "a", tmp_path / "c", target)
    assert verify(tmp_path / "b") == []
    assert files(tmp_path / "b") == files(tmp_path / "c")
    assert open_checkpoint(tmp_path / "b").state == {"step": 4}
    assert (report.path, report.files, report.bytes_read) == (tmp_path / "b", 8, 138)


def test_a_tied_tensor_comes_under_either_name_or_both(tmp_path: Path) -> None:
    save(tmp_path / "a", model(), filled(model()), {})
    want = files(tmp_path / "a")
    table = blobs().pop("embed.weight")
    rest = {n: b for n, b in blobs().items() if n != "embed.weight"}
    for i, names in enumerate((["embed.weight"], ["head.weight"], ["head.weight", "embed.weight"])):
        import_full({**dict.fromkeys(names, table), **rest}, tmp_path / f"b{i}", model(), {"step": 1})
        got = files(tmp_path / f"b{i}")
        assert {n: d for n, d in got.items() if n != "state.json"} != {}
        assert got.keys() == want.keys()
        assert [got[n] for n in got if "rank" in n] == [want[n] for n in want if "rank" in n]


@pytest.mark.parametrize("data", [bytes(96), bytes(48)], ids=["values", "dtype"])
def test_tied_names_with_different_values_are_refused(tmp_path: Path, data: bytes) -> None:
    other = Blob.of("float32" if len(data) == 96 else "float16", (6, 4), data)
    text = "head.weight: tied to embed.weight in the destination, but their values differ in the source"
    assert refusal(lambda: import_full({**blobs(), "head.weight": other}, tmp_path / "b", model(), {})) == text


def test_every_name_shape_and_dtype_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    src = blobs()
    src["extra"] = src.pop("layer.mean")
    src["layer.weight"] = Blob.of("float16", (15,), filled(model())["layer.weight"])
    assert refusal(lambda: import_full(src, tmp_path / "b", model(), {})) == (
        "the strategies do not match:\n"
        "  layer.weight: shape [15] in the source, [5, 3] in the destination\n"
        "  layer.weight: float16 in the source, bfloat16 in the destination; dtypes cannot be changed here\n"
        "  only in the source: extra\n"
        "  only in the destination: layer.mean"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    import_full(blobs(), tmp_path / "b", model(), {"step": 1})
    text = f"{tmp_path / 'b'}: the destination is not empty; give another, or set overwrite: true"
    assert refusal(lambda: import_full(blobs(), tmp_path / "b", model(), {}), FileExistsError) == text
    import_full(blobs(), tmp_path / "b", model(), {"step": 2}, overwrite=True)
    assert open_checkpoint(tmp_path / "b").state == {"step": 2}


def test_changes_to_the_memory_of_an_export_are_imported(tmp_path: Path) -> None:
    save(tmp_path / "a", model(), filled(model()))
    export(tmp_path / "a", tmp_path / "model.safetensors")
    full = read_full(tmp_path / "model.safetensors")
    full["layer.mean"].data[:] = bytes(12)
    import_full(full, tmp_path / "b", replace(model()), {})
    assert (
        bytes(open_checkpoint(tmp_path / "b").folder.joinpath("rank_2/model.safetensors").read_bytes()).find(bytes(12))
        > 0
    )


def test_a_rank_reads_its_pieces_however_many_buffers_they_fill() -> None:
    grid = Grid.of(pp=1, dp_replicate=1, dp_shard=2, tp=2)
    shape = (1100, 1024)
    layouts = {
        "rows": Layout(grid, shape, (("dp_shard",), ())),
        "columns": Layout(grid, shape, ((), ("tp",))),
        "both": Layout(grid, shape, (("dp_shard",), ("tp",))),
        "whole": Layout(grid, shape, ((), ())),
    }
    target = Strategy(grid, {name: Entry(layout, "float32") for name, layout in layouts.items()})
    full = filled(target)
    src = Blobs({n: Blob.of(e.dtype, e.layout.shape, full[n]) for n, e in target.entries.items()})
    for rank in range(grid.size):
        found = dict(import_checkpoint.pieces_of_rank(src, target, rank))
        assert found == blobs_of_rank(target, rank, full)
        assert all(blob.data.nbytes > BUFFER for blob in found.values())
