from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Entry, Strategy, plan_transform, single, target_strategy, transform
from launcher.checkpoint.transform import Source, sources
from launcher.checkpoint.write import saved_boxes
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import files, filled, save, small, strategies, tensors


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_the_plan_is_what_the_transform_reads(data: st.DataObject) -> None:
    of = data.draw(tensors())
    a, b = data.draw(strategies(of)), data.draw(strategies(of))
    full = filled(a)
    with TemporaryDirectory() as made:
        src, dst = Path(made) / "a", Path(made) / "b"
        save(src, a, full)
        plan = plan_transform(src, b)
        assert not dst.exists()
        spans = {rank: list(plan.spans(rank)) for rank in range(b.grid.size)}
        assert plan.nbytes == transform(src, dst, b).bytes_read == sum(map(len, full.values()))
    found = Counter[tuple[int, str]]()
    for rank, list_ in spans.items():
        for span in list_:
            found[rank, span.file] += span.nbytes
    assert found == {(s.rank, s.file): s.nbytes for s in plan.sources if s.nbytes}
    assert all(len([x for x in spans[s.rank] if x.file == s.file]) <= s.tensors for s in plan.sources)


def test_spans_are_bytes_of_the_files(tmp_path: Path) -> None:
    full = filled(small())
    save(tmp_path / "a", small(), full)
    plan = plan_transform(tmp_path / "a", single(small()))
    got = b""
    for span in plan.spans(0):
        if span.name == "embed.weight":
            assert span.stop - span.start == span.nbytes  # full rows
            got += (tmp_path / "a" / span.file).read_bytes()[span.start : span.stop]
    assert got == full["embed.weight"]


def test_a_span_that_is_strided_has_fewer_bytes_than_it_walks_over(tmp_path: Path) -> None:
    one, two = Grid.of(tp=1), Grid.of(tp=2)
    src = Strategy(one, {"w": Entry(Layout(one, (3, 4), ((), ())), "int8")})
    save(tmp_path / "a", src, filled(src))
    dst = Strategy(two, {"w": Entry(Layout(two, (3, 4), ((), ("tp",))), "int8")})
    plan = plan_transform(tmp_path / "a", dst)
    ((right,), base) = (list(plan.spans(1)), (tmp_path / "a/rank_0/model.safetensors").stat().st_size - 12)
    assert (right.start - base, right.stop - base, right.nbytes) == (2, 12, 6)


def test_the_plan_as_text(tmp_path: Path) -> None:
    save(tmp_path / "a", small(), filled(small()))
    plan = plan_transform(tmp_path / "a", target_strategy(small(), nproc=2, stages=1, shard_size=2))
    head = f"{tmp_path / 'a'}: 4 ranks -> 2 ranks, 5 tensors\n"
    head += "242 B to read and to write, at most 40.0 MB in memory at once\n"
    assert (
        plan.text()
        == head
        + """\
rank  reads                         tensors  bytes
   0  rank_0/model.safetensors            1     48
   0  rank_2/model.safetensors            2     30
   0  rank_0/optimizer.safetensors        2     56
   1  rank_1/model.safetensors            1     48
   1  rank_3/model.safetensors            1     12
   1  rank_1/optimizer.safetensors        1     48
"""
    )
    assert (
        plan.text(1)
        == head
        + """\
rank  reads                     tensors  bytes
   0  rank_0/model.safetensors        1     48
and 5 rows more
"""
    )


def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", small(), filled(small()))
    target = small()
    entries = {n: e for n, e in target.entries.items() if n != "layer.mean"}
    text = "the strategies do not match:\n  only in the source: layer.mean"
    assert refusal(lambda: plan_transform(tmp_path / "a", replace(target, entries=entries))) == text
    path = tmp_path / "a" / "rank_1" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"F32", b"I32"))
    text = f"{path}: its header is not the one that the manifest describes"
    assert refusal(lambda: plan_transform(tmp_path / "a", target)) == text


def large(grid: Grid, count: int = 1000) -> Strategy:
    """Matrices of forty sizes, distributed over the stages."""
    return Strategy(
        grid,
        {
            f"p{i}": Entry(
                Layout(grid, (4096 + i % 40, 1024), (("dp_shard",), ("tp",)), (("pp", (i * grid["pp"] // count,)),)),
                "bfloat16",
            )
            for i in range(count)
        },
    )


def calls(act: Any) -> int:
    """The number of function calls, including those of C: it does not depend on the load of the machine."""
    count = 0

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "after", [Grid.of(pp=1, dp_shard=1, tp=1), Grid.of(pp=4, dp_shard=16, tp=8), Grid.of(pp=8, dp_shard=512, tp=1)],
    ids=["1 rank", "512 ranks", "4096 ranks"],
)  # fmt: skip
def test_4096_ranks_of_a_thousand_tensors_are_planned_without_a_look_at_each_rank(after: Grid) -> None:
    src, dst = large(Grid.of(pp=16, dp_shard=64, tp=4)), large(after)
    found: list[Source] = []
    assert calls(lambda: found.extend(sources(src, dst, {n: n for n in src.entries}))) < 500_000  # of 4.1 million pairs
    assert sum(s.nbytes for s in found) == sum(e.spec.nbytes for e in src.entries.values())
    assert {s.rank for s in found} == set(range(after.size))


def test_the_boxes_of_one_of_4096_ranks_are_computed_from_its_own_tensors() -> None:
    src = large(Grid.of(pp=16, dp_shard=64, tp=4))
    assert sum(len(saved_boxes(src, rank)["model.safetensors"]) for rank in range(0, 4096, 64)) == 4000
    assert calls(lambda: saved_boxes(src, 7)) < 6000  # 62 tensors; one call for each of a thousand would fail


def test_planning_writes_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a", small(), filled(small()))
    before = files(tmp_path)
    plan_transform(tmp_path / "a", single(small())).text()
    assert files(tmp_path) == before
