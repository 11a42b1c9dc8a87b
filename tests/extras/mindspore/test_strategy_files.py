from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.extras.mindspore import strategy_file
from launcher.extras.mindspore import strategy_file as strategies
from launcher.extras.mindspore.merge_strategies import merge, read_stages
from launcher.extras.mindspore.strategy import OperatorParts, Slicing, StrategyFile, StrategyForm
from launcher.extras.mindspore.strategy_file import read_strategy, write_strategy
from tests.extras.mindspore.truth import FIXTURES, case, exactly

REAL = FIXTURES / "real_strategy"
FILES = sorted(p for p in REAL.iterdir() if "strategy" in p.name or "merged" in p.name)
FILES += sorted(p for p in (FIXTURES / "cases").rglob("*strategy*.ckpt") if p.is_file())
MERGED = sorted((FIXTURES / "cases").glob("*/*_strategy_stages"))
ROWS = Slicing((2,), ((0,), ()), shape=(4, 4))


def file_of(layouts: dict[str, Slicing], stage: int = 0) -> StrategyFile:
    return StrategyFile(2, (OperatorParts("op", stage, ((1, 2), (2,))),), layouts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: "-".join(p.relative_to(FIXTURES).parts[1:]))
def test_a_file_that_mindspore_wrote_comes_out_byte_for_byte(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    write_strategy(tmp_path / "again", read_strategy(path), strategies.form_of(data))
    assert (tmp_path / "again").read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


@pytest.mark.parametrize(("name", "ranks"), [("pp2", (0, 2)), ("pp2shared", (2, 0))])
def test_merging_real_stages_gives_mindspores_own_merge(name: str, ranks: tuple[int, int]) -> None:
    merged, form = read_stages([REAL / f"{name}_strategy_rank{r}.ckpt" for r in ranks])
    assert strategies.strategy_text(merged, form) == (REAL / f"{name}_merged.ckpt").read_bytes()


@pytest.mark.parametrize("folder", MERGED, ids=lambda p: p.parent.name)
def test_merging_the_stages_of_a_case_gives_mindspores_own_merge(folder: Path) -> None:
    merged, form = read_stages(sorted(folder.iterdir(), reverse=True))
    suffix = ".json" if form == "json" else ".ckpt"
    assert strategies.strategy_text(merged, form) == folder.with_name("src_strategy" + suffix).read_bytes() or (
        strategies.strategy_text(merged, form) == folder.with_name("dst_strategy" + suffix).read_bytes()
    )


@pytest.mark.parametrize("folder", sorted((FIXTURES / "cases").glob("[cs][012][0-9]_*")), ids=lambda p: p.name)
def test_a_strategy_file_says_what_the_case_says(folder: Path) -> None:
    said = case(folder)
    for side in ("src", "dst"):
        for path in folder.glob(f"{side}_strategy.*"):
            for stage, layouts in read_strategy(path).stages().items() if side in said else ():
                for name, slicing in layouts.items():
                    want = said[side][name]
                    assert list(slicing.devices) == want["dev_matrix"]
                    nested = [m if isinstance(m, list) else [m] for m in want["tensor_map"]]
                    assert [list(d) or [-1] for d in slicing.dims] == nested
                    sizes = (slicing.shard_size, slicing.shard_step)
                    assert sizes == (want["opt_weight_shard_size"], want["opt_weight_shard_step"])
                    assert stage in want["stages"]


@pytest.mark.parametrize("form", ["protobuf", "json"])
def test_names_with_dashes_and_tensors_without_dims_live_through_a_merge(form: StrategyForm) -> None:
    layouts = {"blk-1.w-q": ROWS, "0-1": ROWS, "scale": Slicing((2,), (), shape=())}
    stages = [strategies.parse(strategies.strategy_text(file_of(layouts, s), form), f"s{s}") for s in range(2)]
    assert [s.merged for s in stages] == [False, False]
    merged = strategies.parse(strategies.strategy_text(merge([("a", stages[0]), ("b", stages[1])]), form), "m")
    assert merged.merged
    assert {"0-blk-1.w-q", "1-0-1"} < merged.layouts.keys()
    assert merged.stages() == {0: dict(stages[0].layouts), 1: dict(stages[1].layouts)}


def test_manual_splits_are_kept(tmp_path: Path) -> None:
    split = Slicing((2,), ((0,), ()), field=3, split_shape=(3, 5), offsets=(0, 3), shape=(8, 4))
    for form in ("protobuf", "json"):
        write_strategy(tmp_path / "s", file_of({"w": split}), form)
        found = read_strategy(tmp_path / "s").layouts["w"]
        assert (found.field, found.split_shape, found.offsets) == (3, (3, 5), (0, 3))


def test_two_forms_in_one_merge_are_refused(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a", file_of({"w": ROWS}), "protobuf")
    write_strategy(tmp_path / "b", file_of({"w": ROWS}, 1), "json")
    told = f"{tmp_path}/a is protobuf, {tmp_path}/b is json; merge files of one form"
    with pytest.raises(ValueError, match=exactly(f"two forms in one merge: {told}")):
        read_stages([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match=r"\Ano strategy file to merge\Z"):
        read_stages([])


def test_the_form_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    write_strategy(tmp_path / "x.ckpt", file_of({"w": ROWS}), "json")
    assert read_strategy(tmp_path / "x.ckpt") == file_of({"w": ROWS})


def test_json_cannot_hold_a_layout_without_its_shape() -> None:
    with pytest.raises(
        ValueError, match=exactly("w: the JSON form needs the tensor's shape, which the protobuf form omits")
    ):
        strategies.strategy_text(file_of({"w": Slicing((2,), ((0,),))}), "json")


GOOD = strategies.strategy_text(file_of({"w": ROWS}), "protobuf")
ROW = json.loads(strategies.strategy_text(file_of({"w": ROWS}), "json"))["parallel_layout_item"]["w"]
SIZES = "it needs at least one axis, each of size 1 or more"


def with_row(**changes: object) -> bytes:
    return json.dumps({"current_stage": 2, "parallel_layout_item": {"w": ROW | changes}}).encode()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "protobuf): field 1 has 0 values, not one"),
        (GOOD[:-1], "protobuf): truncated: a field spans bytes 24 to 58, but its parent ends at 57"),
        (b"\x0a\x03abc", "protobuf): field 1 is of the wrong kind"),
        (b"\xff" * 11, "protobuf): the number at byte 0 has more than 64 bits"),
        (b"\xff" * 3, "protobuf): truncated: it ends within the number at byte 0"),
        (b"\x08\x02\x22\x00", "protobuf): field 4 is not known"),
        (b"\x0d\x02\x00\x00\x00", "protobuf): byte 0 does not start a field"),
        (b"\x08\x02\x1a\x05\x0a\x01w\x12\x00", "protobuf): parameter w: field 1 occurs 0 times, not once"),
        (b"\x08\x02\x1a\x05\x0a\x01\xff\x12\x00", r"protobuf): b'\xff' is not a name: not UTF-8"),
        (GOOD + GOOD[22:], "protobuf): parameter w is listed twice"),
        (b"{", "json): not JSON"),
        (b"{}", "json): current_stage is None, not a whole number"),
        (b'{"current_stage": NaN}', "json): NaN is not a finite number"),
        (b'{"current_stage": 1, "current_stage": 1}', "json): current_stage is listed twice"),
        (b'{"current_stage": 1, "parallel_layout_item": []}', "json): parallel_layout_item is not a mapping"),
        (b"{" * 5, "json): not JSON"),
        (b'{"a":' * 100_000, "json): not JSON"),
        (with_row(dev_matrix=[0]), f"json): parameter w: device matrix [0]: {SIZES}"),
        (with_row(dev_matrix=[]), f"json): parameter w: device matrix []: {SIZES}"),
        (with_row(tensor_map=[0, 5]), "json): parameter w: tensor map [[0], [5]]: the device matrix has 1 axes"),
        (with_row(tensor_map=[0, 0]), "json): parameter w: tensor map [[0], [0]]: one axis cuts two dims"),
        (with_row(tensor_map="x"), "json): parameter w: tensor_map is 'x', not a list of whole numbers"),
        (with_row(field=True), "json): parameter w: field is True, not a whole number"),
        (with_row(tensor_shape=[-1]), "json): parameter w: tensor_shape has a negative dim: [-1]"),
        (
            with_row(opt_weight_shard_size=3, opt_weight_shard_step=1),
            "json): parameter w: opt_weight_shard_size 3 does not divide the 1 repeats",
        ),
        (
            with_row(opt_weight_shard_size=-2),
            "json): parameter w: opt_weight_shard_size -2 is neither a size nor -1",
        ),
    ],
)  # fmt: skip
def test_damage_is_named(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=exactly(f"f: not a MindSpore strategy file ({told}")):
        strategies.parse(data, "f")


def test_a_checkpoint_a_group_file_and_a_strategy_are_not_mistaken_for_each_other() -> None:
    path = FIXTURES / "formats" / "dtypes.ckpt"
    with pytest.raises(
        ValueError, match=exactly(f"{path}: not a MindSpore strategy file (protobuf): field 1 is of the wrong kind")
    ):
        read_strategy(FIXTURES / "formats" / "dtypes.ckpt")
    path = REAL / "tp8_strategy_rank0.ckpt"
    with pytest.raises(ValueError, match=exactly(f"{path}: not a MindSpore group file: field 1 is of the wrong kind")):
        strategy_file.read_groups(path)
