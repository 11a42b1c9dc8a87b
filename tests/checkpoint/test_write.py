from __future__ import annotations

from pathlib import Path

from launcher.checkpoint import Blob, open_checkpoint, read_rank, write_rank
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, filled, save, small


def test_a_rank_saves_all_its_pieces_at_their_shapes_and_nothing_else(tmp_path: Path) -> None:
    strategy = small()
    given = blobs_of_rank(strategy, 2, filled(strategy))
    given["other"] = given.pop("layer.mean")
    given["layer.weight"] = Blob.of("float16", (3, 2), bytes(12))
    assert refusal(lambda: write_rank(tmp_path / "a", 2, strategy, given)) == (
        "rank 2 cannot be saved:\n"
        "  missing tensors, which the strategy has on this rank: layer.mean\n"
        "  unexpected tensors, which the strategy does not have on this rank: other\n"
        "  layer.weight: float16[3, 2] was passed, its piece is bfloat16[3, 3]"
    )
    assert not (tmp_path / "a").exists()


def test_a_rank_out_of_the_world_is_refused(tmp_path: Path) -> None:
    text = "rank 4 is not in the strategy of 4 ranks"
    save(tmp_path / "b", small(), filled(small()))
    assert refusal(lambda: write_rank(tmp_path / "a", 4, small(), {})) == text
    assert refusal(lambda: read_rank(open_checkpoint(tmp_path / "b"), small(), 4)) == text


def test_each_piece_is_saved_once_by_the_lowest_rank_that_holds_it(tmp_path: Path) -> None:
    strategy = small()
    records = save(tmp_path / "a", strategy, filled(strategy))
    saved = {(r.rank, name) for r in records for record in r.files.values() for name in record.tensors}
    assert saved == {
        (0, "embed.weight"), (1, "embed.weight"),
        (0, "optim.embed.weight.exp_avg"), (1, "optim.embed.weight.exp_avg"), (0, "optim.step"),
        (2, "layer.weight"), (3, "layer.weight"), (2, "layer.mean"),
    }  # fmt: skip
