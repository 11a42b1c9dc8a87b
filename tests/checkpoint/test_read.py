from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import (
    Blob,
    commit,
    open_checkpoint,
    partial,
    read_box,
    read_extra,
    read_rank,
    single,
    step_folder,
    verify,
    write_rank,
)
from launcher.plan.values.layout import Box
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, cut, filled, save, small, strategies, tensors


def saved(home: Path, *steps: int) -> list[Path]:
    for step in steps:
        save(step_folder(home, step), small(), filled(small(), step), {"step": step})
    return [step_folder(home, step) for step in steps]


def test_random_states_come_back_to_the_rank_that_saved_them(tmp_path: Path) -> None:
    strategy, final = small(), step_folder(tmp_path, 1)
    full = filled(strategy)
    records = [
        write_rank(
            partial(final),
            r,
            strategy,
            blobs_of_rank(strategy, r, full),
            {"rng": Blob.of("uint8", (3,), bytes([r] * 3))},
        )
        for r in range(4)
    ]
    commit(partial(final), final, records, {})
    checkpoint = open_checkpoint(final)
    assert [bytes(read_extra(checkpoint, r)["rng"].data) for r in range(4)] == [bytes([r] * 3) for r in range(4)]
    assert verify(final) == []


def test_without_random_states_there_are_none(tmp_path: Path) -> None:
    assert read_extra(open_checkpoint(saved(tmp_path, 1)[0]), 0) == {}


def test_an_unknown_tensor_cannot_be_read(tmp_path: Path) -> None:

    (folder,) = saved(tmp_path, 1)
    text = f"{folder}: it has no tensor other"
    assert refusal(lambda: read_box(open_checkpoint(folder), "other", Box((), ()))) == text


def test_a_state_that_was_edited_is_refused(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
    (folder / "state.json").write_text((folder / "state.json").read_text().replace("1", "2"))
    text = "damaged: its digest is not the one in the manifest"
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder / 'state.json'}: {text}"


def test_a_strategy_that_was_edited_is_refused(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
    path = folder / "strategy" / "stage1.json"
    path.write_text(path.read_text().replace("[5, 3]", "[4, 3]"))
    text = "its strategy files are not those that the manifest describes"
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder}: {text}"


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
            assert got.keys() == b.entries_of(rank).keys()
            for name, blob in got.items():
                box = b.entries[name].layout.box(rank)
                assert box is not None
                assert blob == cut(full[name], b.entries[name].spec, box)


def test_a_box_is_read_across_pieces_and_by_alias(tmp_path: Path) -> None:
    strategy = small()
    full = filled(strategy)
    save(tmp_path / "a", strategy, full)
    checkpoint = open_checkpoint(tmp_path / "a")
    box = Box((2, 1), (5, 3))
    assert read_box(checkpoint, "head.weight", box) == cut(
        full["embed.weight"], strategy.entries["embed.weight"].spec, box
    )


def test_a_tie_may_be_named_the_other_way_round_in_the_destination(tmp_path: Path) -> None:

    strategy = small()
    full = filled(strategy)
    save(tmp_path / "a", strategy, full)
    entries = dict(strategy.entries)
    entries["head.weight"] = replace(entries.pop("embed.weight"), aliases=("embed.weight",))
    got = read_rank(open_checkpoint(tmp_path / "a"), single(replace(strategy, entries=entries)), 0)
    assert bytes(got["head.weight"].data) == full["embed.weight"]
