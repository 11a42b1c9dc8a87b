from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import (
    export,
    open_checkpoint,
    read_box,
    read_full,
    read_rank,
    single,
    target_strategy,
    transform,
    verify,
)
from launcher.plan.values.layout import Box
from tests.checkpoint.saving import cut, files, filled, save, small, strategies, tensors


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_there_and_back_is_the_same_bytes(data: st.DataObject) -> None:
    of = data.draw(tensors())
    a, b = data.draw(strategies(of)), data.draw(strategies(of))
    with TemporaryDirectory() as made:
        home = Path(made)
        save(home / "a", a, filled(a), {"step": 3, "note": "ä"})
        transform(home / "a", home / "b", b)
        transform(home / "b", home / "a2", a, workers=data.draw(st.integers(1, 4)))
        assert verify(home / "b") == []
        assert files(home / "a2") == files(home / "a")


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_rank_of_any_layout_reads_its_piece_of_the_full_tensor(data: st.DataObject) -> None:
    of = data.draw(tensors())
    a, b = data.draw(strategies(of)), data.draw(strategies(of))
    full = filled(a)
    with TemporaryDirectory() as made:
        save(Path(made) / "a", a, full)
        checkpoint = open_checkpoint(Path(made) / "a")
        for rank in range(b.grid.size):
            got = read_rank(checkpoint, b, rank)
            assert got.keys() == b.held(rank).keys()
            for name, blob in got.items():
                box = b.entries[name].layout.box(rank)
                assert box is not None
                assert blob == cut(full[name], b.entries[name].spec, box)


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


def test_a_box_is_read_across_pieces_and_by_alias(tmp_path: Path) -> None:
    strategy = small()
    full = filled(strategy)
    save(tmp_path / "a", strategy, full)
    checkpoint = open_checkpoint(tmp_path / "a")
    box = Box((2, 1), (5, 3))
    assert read_box(checkpoint, "head.weight", box) == cut(
        full["embed.weight"], strategy.entries["embed.weight"].spec, box
    )


def test_each_piece_is_saved_once_by_the_lowest_rank_that_holds_it(tmp_path: Path) -> None:
    strategy = small()
    records = save(tmp_path / "a", strategy, filled(strategy))
    saved = {(r.rank, name) for r in records for record in r.files.values() for name in record.tensors}
    assert saved == {
        (0, "embed.weight"), (1, "embed.weight"),
        (0, "optim.embed.weight.exp_avg"), (1, "optim.embed.weight.exp_avg"), (0, "optim.step"),
        (2, "layer.weight"), (3, "layer.weight"), (2, "layer.mean"),
    }  # fmt: skip


def test_four_ranks_become_one_and_the_state_goes_along(tmp_path: Path) -> None:
    strategy = small()
    full = filled(strategy)
    save(tmp_path / "a", strategy, full, {"step": 7, "samples": 56})
    target = target_strategy(strategy, nproc=1, stages=1, shard_size=1)
    report = transform(tmp_path / "a", tmp_path / "one", target)
    one = open_checkpoint(tmp_path / "one")
    assert one.state == {"step": 7, "samples": 56}
    assert {n: bytes(b.data) for n, b in read_rank(one, single(strategy), 0).items()} == full
    assert report.files == 3  # model, optimizer, the strategy of one stage
    assert report.bytes_read == sum(map(len, full.values()))


def test_a_tie_may_be_named_the_other_way_round_in_the_destination(tmp_path: Path) -> None:

    strategy = small()
    full = filled(strategy)
    save(tmp_path / "a", strategy, full)
    entries = dict(strategy.entries)
    entries["head.weight"] = replace(entries.pop("embed.weight"), aliases=("embed.weight",))
    got = read_rank(open_checkpoint(tmp_path / "a"), single(replace(strategy, entries=entries)), 0)
    assert bytes(got["head.weight"].data) == full["embed.weight"]
