"""Bad inputs for which MindSpore is wrong or silent: here each is read correctly, or an error names the file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint import (
    Blob,
    Strategy,
    load_segmented_checkpoints,
    read_full,
    transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.tensorfile.disk import Unwritten
from launcher.checkpoint.tensorfile.safetensors import read_header
from launcher.extras.mindspore.ckpt import TEXT, open_ckpt, text_bytes, write_ckpt
from launcher.extras.mindspore.shapes_of_slices import of_full_tensors
from launcher.plan.values.tensor_spec import TensorSpec
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, files, filled, save
from tests.extras.mindspore.small_net import Files, Home, cut_short, made, net, refused
from tests.extras.mindspore.truth import FIXTURES, blobs, rank_files


@pytest.fixture(params=[".safetensors", ".ckpt"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    """TP4 -> TP2."""
    return made(tmp_path, request.param, net(4), net(2))


@pytest.fixture(params=[".safetensors", ".ckpt"])
def piped(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    """PP2 x TP2 -> TP2."""
    return made(tmp_path, request.param, net(2, 2), net(2))


def drop(name: str) -> Callable[[Files], object]:
    return lambda tensors: tensors.pop(name)


def turn(name: str, dtype: str, *shape: int) -> Callable[[Files], object]:
    blob = Blob.of(dtype, shape, bytes(TensorSpec(shape, dtype).nbytes))
    return lambda tensors: tensors.update({name: blob})


def renamed(of: Strategy, old: str, new: str) -> Strategy:
    return Strategy(of.grid, {new if n == old else n: e for n, e in of.entries.items()})


def without(of: Strategy, *names: str) -> Strategy:
    return Strategy(of.grid, {n: e for n, e in of.entries.items() if n not in names})


def more(of: Strategy, name: str) -> Strategy:
    return Strategy(of.grid, {**of.entries, name: of.entries["norm"]})


def other(of: Strategy) -> Strategy:
    return Strategy(of.grid, {f"other.{n}": e for n, e in of.entries.items() if e.kind == "param"})


Damage = Callable[[Home], object]
UNLISTED = "{home}/src/rank_%d/net-1_1{suffix}: %s is in no strategy, and differs from its value on rank 0; "
UNLISTED += "give files of one save, and a strategy that lists it, saved with only_trainable_params=False"
ROWS: dict[str, tuple[Damage, str]] = {
    "1 the folder of a rank is missing": (lambda h: shutil.rmtree(h.file(3).parent),
        "the source strategy has 4 ranks; no folder for rank 3"),
    "1 the file of a rank is missing": (lambda h: h.file(3).unlink(),
        "{home}/src/rank_3: no .safetensors or .ckpt file in it"),
    "10 a parameter is missing on one rank": (lambda h: h.put(3, drop("l-1.w")),
        "{home}/src/rank_3/net-1_1{suffix}: not in the file, but on rank 3 in the strategy: l-1.w"),
    "11 a slice of another shape": (lambda h: h.put(2, turn("emb.w", "float32", 3, 8)),
        "{home}/src/rank_2/net-1_1{suffix}: tensor emb.w is float32[3, 8], the strategy says float32[2, 8]"),
    "12 a slice of another dtype": (lambda h: h.put(2, turn("emb.w", "float64", 2, 8)),
        "{home}/src/rank_2/net-1_1{suffix}: tensor emb.w is float64[2, 8], the strategy says float32[2, 8]"),
    "13 a strategy with shapes whose axes are swapped": (lambda h: h.strategy("src", net(4, swapped=True), "json"),
        "the strategy file does not fit:\n"
        "  adam_m.l-1.w: slices of float32[8, 2] make [32, 2], but the strategy has [8, 8]; "
        "give the files and the strategy of one save\n"
        "  emb.w: slices of float32[2, 8] make [2, 32], but the strategy has [8, 8]; "
        "give the files and the strategy of one save\n"
        "  l-1.w: slices of float32[8, 2] make [32, 2], but the strategy has [8, 8]; "
        "give the files and the strategy of one save",
    ),
    "14 a strategy of fewer ranks": (lambda h: h.strategy("src", net(2)),
        "{home}/src/rank_2/net-1_1{suffix}: rank 2 is not in the source strategy's world of 2"),
    "15 a strategy of more ranks": (lambda h: h.strategy("src", net(8)),
        "the source strategy has 8 ranks; no folder for rank 4, 5, 6, 7"),
    "16 strategies of another model": (lambda h: h.both(other),
        "the strategy file does not fit:\n"
        "  other.emb.w, other.l-1.w, other.norm, other.scale: in the strategy, but not in the checkpoint"),
    "17 one name differs in the strategies": (lambda h: h.both(lambda of: renamed(of, "emb.w", "wte.w")),
        "the strategy file does not fit:\n  wte.w: in the strategy, but not in the checkpoint"),
    "18 a parameter that no file has": (lambda h: h.both(lambda of: more(of, "bias")),
        "the strategy file does not fit:\n  bias: in the strategy, but not in the checkpoint"),
    "19 a strategy cut short": (lambda h: cut_short(h.path / "src.ckpt", 0.95),
        "{home}/src.ckpt: not a MindSpore strategy file (protobuf): "
        "truncated: a field spans bytes 269 to 314, but its parent ends at 298"),
    "19 a strategy of random bytes": (lambda h: (h.path / "src.ckpt").write_bytes(b"\x93\x01\xff" * 40),
        "{home}/src.ckpt: not a MindSpore strategy file (protobuf): byte 0 does not start a field"),
    "20 the source strategy is cut between parameters": (lambda h: h.strategy("src", without(net(4), "emb.w")),
        "\n".join(UNLISTED % (rank, "emb.w") for rank in range(1, 4))),
    "20 both strategies are cut between parameters": (lambda h: h.both(lambda of: without(of, "emb.w")),
        "\n".join(UNLISTED % (rank, "emb.w") for rank in range(1, 4))),
    "20 the destination strategy leaves out what is trained": (
        lambda h: h.strategy("dst", without(h.dst, "l-1.w", "adam_m.l-1.w")),
        "the strategies do not match:\n  only in the source: adam_m.l-1.w, l-1.w"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_a_source_that_does_not_fit_is_refused(home: Home, row: str) -> None:
    damage, text = ROWS[row]
    damage(home)
    refused(home, text)


BYTES: dict[str, tuple[Damage, str, str]] = {
    "4 5 a file of 0 bytes": (lambda h: h.file(3).write_bytes(b""),
        "{home}/src/rank_3/net-1_1.safetensors: truncated: a safetensors file has at least 8 bytes, this one 0",
        "{home}/src/rank_3/net-1_1.ckpt: not a MindSpore checkpoint: it is empty"),
    "4 6 a file cut short": (lambda h: cut_short(h.file(3)),
        "{home}/src/rank_3/net-1_1.safetensors: truncated: its header ends at byte 328, the file has 324",
        "{home}/src/rank_3/net-1_1.ckpt: "
        "tensor norm: truncated: its entry would end at byte 219, but the tensors end at 205"),
    "21 a model's checkpoint given as strategy": (lambda h: shutil.copy(h.file(0), h.path / "src.ckpt"),
        "{home}/src.ckpt: not a MindSpore strategy file (protobuf): field 8 is not known",
        "{home}/src.ckpt: not a MindSpore strategy file (protobuf): field 1 is of the wrong kind"),
}  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("row", BYTES)
def test_a_damaged_file_is_named_and_nothing_is_written(home: Home, row: str, processes: int) -> None:
    damage, *texts = BYTES[row]
    damage(home)
    refused(home, texts[home.suffix == ".ckpt"], process_num=processes)


def test_row_4_where_each_rank_is_copied_a_damaged_one_is_named_too(tmp_path: Path) -> None:
    home = made(tmp_path, ".safetensors", net(4), net(4))
    home.file(3).write_bytes(b"")
    refused(home, BYTES["4 5 a file of 0 bytes"][1], process_num=2)


def test_row_2_a_rank_of_the_last_stage_is_missing(piped: Home) -> None:
    shutil.rmtree(piped.file(3).parent)
    refused(piped, "the source strategy has 4 ranks; no folder for rank 3")


def test_row_3_a_file_of_the_last_stage_is_cut_short(piped: Home) -> None:
    cut_short(piped.file(3))
    text = {
        ".safetensors": "truncated: its tensors end at byte 540, the file has 324",
        ".ckpt": "not a MindSpore checkpoint, or damaged, at byte 222: the entry does not start with a name",
    }[piped.suffix]
    refused(piped, f"{{home}}/src/rank_3/net-1_1{{suffix}}: {text}")


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "24 a destination that is not empty": ({"dst_checkpoints_dir": "full"}, FileExistsError,
        "{home}/full: the destination is not empty; give another"),
    "25 the destination is the source": ({"dst_checkpoints_dir": "src"}, ValueError,
        "{home}/src: the destination and the source {home}/src are the same folder, or one is in the other"),
    "26 a prefix that leaves the folder": ({"ckpt_prefix": "../evil"}, ValueError,
        "ckpt_prefix: '../evil' leaves the rank's folder; give the start of a file name"),
    "27 no process": ({"process_num": 0}, ValueError, "process_num: 0 is less than 1"),
    "28 a format that is not there": ({"output_format": "npz"}, ValueError,
        "output_format: 'npz' is not known; give safetensors or ckpt"),
}  # fmt: skip


@pytest.mark.parametrize("row", CALLS)
def test_a_call_that_cannot_be_right_is_refused(home: Home, row: str) -> None:
    given, kind, text = CALLS[row]
    (home.path / "full").mkdir()
    (home.path / "full" / "stale").touch()
    refused(home, text, kind, **{k: home.path / v if k.endswith("dir") else v for k, v in given.items()})


def test_row_7_a_flipped_bit_in_a_checkpoint_of_ours_is_named(tmp_path: Path) -> None:
    src = net(4)
    save(tmp_path / "ours", src, filled(src))
    path = tmp_path / "ours" / "rank_2" / "model.safetensors"
    slot = read_header(path).entries["emb.w"]
    raw = bytearray(path.read_bytes())
    raw[slot.start] ^= 1
    path.write_bytes(raw)
    for act in (
        lambda: transform_checkpoints(tmp_path / "ours", tmp_path / "out", "out"),
        lambda: transform(tmp_path / "ours", tmp_path / "out", net(2), workers=2),
    ):
        assert refusal(act).startswith(f"{path}: tensor emb.w is damaged: its digest is ")
        assert not [*tmp_path.glob("out*")]


def test_row_8_a_flipped_bit_in_a_ckpt_with_a_checksum_is_found(tmp_path: Path) -> None:
    home = made(tmp_path, ".ckpt", net(4), net(2))
    tensors = blobs_of_rank(net(4), 1, home.full)
    specs = {n: b.spec for n, b in tensors.items()}
    write_ckpt(home.file(1), specs, lambda n: [tensors[n].data], crc=True)
    home.call(dst_checkpoints_dir=tmp_path / "good")
    shutil.rmtree(tmp_path / "good")
    raw = bytearray(home.file(1).read_bytes())
    raw[raw.index(bytes(tensors["emb.w"].data))] ^= 1
    home.file(1).write_bytes(raw)
    found = refusal(home.call)
    assert found.startswith(f"{home.file(1)}: damaged: its CRC-32 is ")
    assert not (tmp_path / "out").exists()


def test_row_9_a_ckpt_cut_between_two_tensors_lacks_the_last(tmp_path: Path) -> None:
    home = made(tmp_path, ".ckpt", net(4), net(2))
    last = [*blobs_of_rank(net(4), 3, home.full)][-1]
    home.put(3, drop(last))
    whole = made(tmp_path / "x", ".ckpt", net(4), net(2)).file(3).read_bytes()
    assert whole.startswith(home.file(3).read_bytes())  # so the damaged file is the original, cut at a record
    refused(home, f"{{home}}/src/rank_3/net-1_1.ckpt: not in the file, but on rank 3 in the strategy: {last}")


def test_row_22_names_with_dashes_and_numbers_without_dims_come_out_right(home: Home) -> None:
    home.call(process_num=2)
    home.right()


def test_two_stages_come_out_right(piped: Home) -> None:
    piped.call()
    piped.right()


def test_row_23_the_highest_step_counts_as_a_number(home: Home) -> None:
    for rank in range(4):
        path = home.file(rank)
        path.rename(path.with_name(f"net-10_5{home.suffix}"))
        home.put(rank, lambda tensors: tensors.update({n: turned(b) for n, b in tensors.items()}),
                 path.with_name(f"net-9_5{home.suffix}"))  # fmt: skip
    home.call()
    home.right()


def turned(blob: Blob) -> Blob:
    return Blob.of(blob.dtype, blob.shape, bytes(blob.data)[::-1])


def test_row_29_a_string_among_the_tensors_goes_along(tmp_path: Path) -> None:
    home = made(tmp_path, ".ckpt", net(4), net(2))
    for rank in range(4):
        tensors = blobs_of_rank(net(4), rank, home.full)
        specs = {n: b.spec for n, b in tensors.items()} | {"run": TensorSpec((3,), TEXT)}
        write_ckpt(home.file(rank), specs, lambda n, of=tensors: [of[n].data] if n in of else [text_bytes("abc")])
    home.call()
    assert {open_ckpt(tmp_path / "out" / f"rank_{r}" / f"out{r}.ckpt").text("run") for r in (0, 1)} == {"abc"}


def test_row_30_encrypted_sources_are_told_from_damaged_ones(tmp_path: Path) -> None:
    home, key = made(tmp_path, ".ckpt", net(4), net(2)), bytes(range(32))
    for rank in range(4):
        tensors = blobs_of_rank(net(4), rank, home.full)
        specs = {n: b.spec for n, b in tensors.items()}
        write_ckpt(home.file(rank), specs, lambda n, of=tensors: [of[n].data], key=key)
    text = (
        "{home}/src/rank_0/net-1_1.ckpt: encrypted; read it with load_segmented_checkpoints, dec_key and "
        'dec_mode="AES-GCM", and save the result in plain files for other uses'
    )
    refused(home, text)
    found = load_segmented_checkpoints(str(home.file(0).parent), dec_key=key)
    raw = {n: bytes(p.detach().reshape(-1).view(torch.uint8).numpy()) for n, p in found.items()}
    assert raw == {n: bytes(blob.data) for n, blob in blobs_of_rank(net(4), 0, home.full).items()}


def test_row_31_a_checksum_and_a_key_together_are_refused(tmp_path: Path) -> None:
    found = refusal(lambda: write_ckpt(tmp_path / "x.ckpt", {}, lambda n: [], crc=True, key=bytes(32)))
    assert found == "a checksum (crc) and encryption: MindSpore cannot read a file with both; use one"
    assert not (tmp_path / "x.ckpt").exists()


def bf16(of: Strategy) -> Strategy:
    return Strategy(of.grid, {n: replace(e, dtype="bfloat16") for n, e in of.entries.items()})


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
def test_row_36_bfloat16_comes_out_right(tmp_path: Path, suffix: str) -> None:
    home = made(tmp_path, suffix, bf16(net(2, 2)), bf16(net(2)))
    home.call()
    home.right()


def test_row_32_bfloat16_takes_a_checksum(tmp_path: Path) -> None:
    blob = Blob.of("bfloat16", (2,), b"abcd")
    write_ckpt(tmp_path / "x.ckpt", {"w": blob.spec}, lambda n: [blob.data], crc=True)
    assert blobs(tmp_path / "x.ckpt") == {"w": blob}


def test_row_33_a_full_disk_leaves_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = files(home.path)
    monkeypatch.setattr(os, "pwrite", full)
    found = refusal(home.call, Unwritten)  # an OSError
    assert "No space left on device" in found
    assert files(home.path) == before
    monkeypatch.undo()
    home.call()  # the next call succeeds
    home.right()


FIXED = {"34 optimizer shards along an ascending tensor map": "c16_bug_opt_shard_ascending_map",
         "35 a tied parameter belongs to both stages": "c17_shared_param_tp2_to_pp2tp2",
         "37 slices along any dim": "s06_dp4tp2_opt2_to_dp2tp4_optfull"}  # fmt: skip


@pytest.mark.parametrize("row", FIXED)
def test_transforms_that_mindspore_gets_wrong_are_correct_here(tmp_path: Path, row: str) -> None:
    folder = FIXTURES / "cases" / FIXED[row]
    side = {which: str(next(folder.glob(f"{which}_strategy.*"))) for which in ("src", "dst")}
    transform_checkpoints(folder / "src", tmp_path / "out", "out", side["src"], side["dst"])
    full = read_full(folder / "full.safetensors")
    found = open_strategy("dst", side["dst"])
    assert found is not None
    dst = of_full_tensors(found, {n: b.spec for n, b in full.items()})
    for rank, path in rank_files(tmp_path / "out").items():
        want = blobs_of_rank(dst, rank, {n: bytes(full[n].data) for n in dst.entries})
        assert {n: b for n, b in blobs(path).items() if n in want} == want


def test_row_38_files_of_two_ranks_swapped_are_named(tmp_path: Path) -> None:
    """Only files that we wrote: MindSpore's own do not say which rank they belong to."""
    home = made(tmp_path, ".safetensors", net(4), net(2))
    home.call()
    one, two = (home.path / "out" / f"rank_{r}" / f"out{r}.safetensors" for r in (0, 1))
    found = refusal(
        lambda: transform_checkpoint_by_rank(
            0, {0: str(two), 1: str(one)}, str(home.path / "x.safetensors"), str(home.path / "dst.ckpt"), None
        )
    )
    assert found == (
        f"{two}: a file of another rank or layout: it says rank 1, not 0\n"
        f"{one}: a file of another rank or layout: it says rank 0, not 1"
    )
    assert not (home.path / "x.safetensors").exists()
