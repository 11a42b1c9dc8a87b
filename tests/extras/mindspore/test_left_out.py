"""Tensors that a strategy of trainable parameters leaves out, and folders of data-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import Blob, Strategy, open_checkpoint, rank_list_for_transform, transform_checkpoint_by_rank
from launcher.checkpoint.foreign.import_checkpoint import read_incoming
from launcher.checkpoint.layout.derive_strategy import with_left_out_tensors
from launcher.checkpoint.layout.strategy import Entry
from launcher.checkpoint.transform import transform
from launcher.extras.mindspore.ckpt import write_ckpt
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, filled, save
from tests.extras.mindspore.small_net import Home, made, net
from tests.extras.mindspore.truth import blobs

SHAPES = {"emb.w": (8, 8), "bn.gamma": (4,), "bn.moving_mean": (4,), "bn.moving_variance": (4,), "frozen.w": (15,)}
LISTED = "to use the value of any rank, give a strategy that lists it, saved with only_trainable_params=False"
LEFT = ("bn.moving_mean", "bn.moving_variance", "frozen.w")


def trainable(of: Strategy) -> Strategy:
    return Strategy(of.grid, {n: e for n, e in of.entries.items() if n not in LEFT})


@pytest.fixture(params=[".ckpt", ".safetensors"])
def home(tmp_path: Path, request: pytest.FixtureRequest) -> Home:
    return made(tmp_path, request.param, net(4, shapes=SHAPES), net(2, shapes=SHAPES))


@pytest.mark.parametrize("sides", [("src",), ("dst",), ("src", "dst")], ids=" and ".join)
@pytest.mark.parametrize("stages", [1, 2])
def test_tensors_that_a_strategy_of_trainable_parameters_leaves_out_are_copied(
    tmp_path: Path, home: Home, sides: tuple[str, ...], stages: int
) -> None:
    home = made(tmp_path / "x", home.suffix, net(2, stages, SHAPES), net(4, shapes=SHAPES))
    for side in sides:
        home.strategy(side, trainable(getattr(home, side)))
    home.call()
    home.right()
    by_rank = tmp_path / f"one{home.suffix}"
    files = (str(home.path / "src.ckpt"), str(home.path / "dst.ckpt"))
    ranks = rank_list_for_transform(3, *files)
    transform_checkpoint_by_rank(3, {r: str(home.file(r)) for r in ranks}, str(by_rank), *files)
    assert blobs(by_rank) == blobs(home.path / "out" / "rank_3" / f"out3{home.suffix}")


def test_tensors_that_a_strategy_leaves_out_are_imported(home: Home) -> None:
    home.strategy("src", trainable(home.src))
    found = read_incoming(home.path / "src", strategy=home.path / "src.ckpt").tensors
    assert {name: spec.shape for name, spec in found.specs.items()} == SHAPES


def test_statistics_that_differ_between_ranks_are_refused_by_name(home: Home) -> None:
    home.strategy("src", trainable(home.src))
    other = Blob.of("float32", (4,), bytes(16))
    home.put(2, lambda t: t.update({"bn.moving_mean": other}))
    text = f"{home.file(2)}: bn.moving_mean is in no strategy, and differs from its value on rank 0; {LISTED}"
    assert refusal(home.call) == text

    # the cure: a strategy of all parameters
    home.strategy("src", home.src)
    home.call()
    found = read_incoming(home.path / "src", strategy=home.path / "src.ckpt").tensors
    assert {name: spec.shape for name, spec in found.specs.items()} == SHAPES


def test_copies_that_differ_are_refused_by_name_and_rank(home: Home) -> None:
    home.put(2, lambda t: t.update({"bn.gamma": Blob.of("float32", (4,), bytes(16))}))
    text = f"{home.file(2)}: bn.gamma differs from rank 0, though both are copies in the strategy; "
    text += "give files of one save, and their own strategy"
    assert refusal(home.call) == text
    assert refusal(lambda: read_incoming(home.path / "src", strategy=home.path / "src.ckpt")) == text


def test_statistics_that_differ_between_data_parallel_ranks_can_be_those_of_the_first(tmp_path: Path) -> None:
    grid = Grid((("dp", 2),))
    of = Strategy(grid, {n: Entry(Layout(grid, s, ((),) * len(s)), "float32") for n, s in SHAPES.items()})
    home = made(tmp_path, ".safetensors", of, net(2, shapes=SHAPES))
    home.strategy("src", trainable(of))
    home.put(1, lambda t: t.update({"bn.moving_mean": Blob.of("float32", (4,), bytes(16))}))
    first = home.file(0)
    text = f"{home.file(1)}: bn.moving_mean is in no strategy, and differs from its value on rank 0; "
    way_out = f"to use the value of rank 0, give {first} alone, without a strategy"
    assert refusal(lambda: read_incoming(home.path / "src", strategy=home.path / "src.ckpt")) == text + way_out
    found = read_incoming(first).tensors
    assert {name: spec.shape for name, spec in found.specs.items()} == SHAPES
    one = tmp_path / "one.safetensors"
    transform_checkpoint_by_rank(1, {0: str(first)}, str(one), None, str(home.path / "dst.ckpt"))
    assert blobs(one)["bn.moving_mean"] == blobs(first)["bn.moving_mean"]


def copies(home: Home, ranks: int, change: dict[int, dict[str, Blob]] | None = None) -> Path:
    """Write ``rank_<k>`` folders of data-parallel ranks; each has the full checkpoint."""
    folder = home.path / "copies"
    one = net(1, shapes=SHAPES)
    full = blobs_of_rank(one, 0, filled(one))
    for rank in range(ranks):
        tensors = {**full, **(change or {}).get(rank, {})}
        path = folder / f"rank_{rank}" / "net-1_1.ckpt"
        path.parent.mkdir(parents=True)
        write_ckpt(path, {n: b.spec for n, b in tensors.items()}, lambda n, of=tensors: [of[n].data])
    return folder


def test_folders_of_data_parallel_ranks_are_one_full_checkpoint(home: Home) -> None:
    src = copies(home, 4)
    home.call(src_checkpoints_dir=src, src_strategy_file=None)
    home.right()
    one = home.path / f"one{home.suffix}"
    files = {r: str(src / f"rank_{r}" / "net-1_1.ckpt") for r in range(4)}
    transform_checkpoint_by_rank(1, files, str(one), None, str(home.path / "dst.ckpt"))
    assert blobs(one) == blobs(home.path / "out" / "rank_1" / f"out1{home.suffix}")
    found = read_incoming(src).tensors
    assert {name: spec.shape for name, spec in found.specs.items()} == SHAPES


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"emb.w": Blob.of("float32", (8, 8), bytes(256))}, "emb.w"),
        ({"emb.w": Blob.of("float32", (2, 8), bytes(64))}, "emb.w"),
        (
            {"more": Blob.of("float32", (1,), bytes(4)), "emb.w": Blob.of("int32", (8, 8), bytes(256))},
            "emb.w and 1 more",
        ),
    ],
    ids=["numbers", "a slice", "names and dtypes"],
)
def test_ranks_that_are_no_copies_of_each_other_are_refused_by_name(home: Home, change: Any, names: str) -> None:
    src = copies(home, 3, {2: change})
    text = (
        f"then all ranks must have the same full checkpoint, but {names} of rank 2 differs from rank 0; "
        f"give the strategy file that they were saved with, or {src}/rank_0/net-1_1.ckpt alone"
    )
    told = refusal(lambda: home.call(src_checkpoints_dir=src, src_strategy_file=None))
    assert told == f"src_strategy_file is None: {text}"
    assert refusal(lambda: read_incoming(src)) == f"{src}: no strategy file: {text}"


def test_a_checkpoint_of_ours_takes_a_strategy_of_its_trainable_parameters(tmp_path: Path) -> None:
    src, dst = net(2, 2, SHAPES), trainable(net(2, shapes=SHAPES))
    save(tmp_path / "a", src, filled(src))
    target = with_left_out_tensors(dst, src)
    transform(tmp_path / "a", tmp_path / "b", target)
    found = open_checkpoint(tmp_path / "b").strategy.entries
    assert {n: found[n].layout.split for n in LEFT} == {n: ((),) * len(SHAPES[n]) for n in LEFT}


def test_left_out_tensors_are_on_the_stages_of_their_module() -> None:
    target = with_left_out_tensors(trainable(net(2, 2, SHAPES)), net(4, shapes=SHAPES))
    at = {name: dict(target.entries[name].layout.at).get("pp") for name in LEFT}
    assert at == {"bn.moving_mean": (1,), "bn.moving_variance": (1,), "frozen.w": None}
