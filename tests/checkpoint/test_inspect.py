from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Entry, Strategy, holdings, inspect, single
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import small, strategies, tensors


def test_inspect_prints_a_table_of_tensors_and_their_ranks() -> None:
    assert (
        inspect(small())
        == """\
5 tensors, 242 B, 4 ranks (pp 2 x dp_replicate 1 x dp_shard 2 x tp 1)
tensor                      shape  dtype     kind    split         stages  ranks  bytes
embed.weight = head.weight  6x4    float32   param   dp_shard | -  0-1     0-3       96
layer.weight                5x3    bfloat16  param   dp_shard | -  1       2-3       30
layer.mean                  3      float32   buffer  -             1       2-3       12
optim.embed.weight.exp_avg  6x4    float32   optim   dp_shard | -  0-1     0-3       96
optim.step                  -      int64     optim   -             0-1     0-3        8
"""
    )


def test_a_device_matrix_of_its_own_is_beside_the_axes() -> None:
    strided = Layout(Grid.of(pp=2, x=2, y=4), (8, 2), (("y", "x"), ()), (("pp", (1,)),))
    strategy = Strategy(Grid.of(pp=2, dp=8), {"w": Entry(strided, "float32")})
    row = "w       8x2    float32  param  y*x | - of pp 2 x x 2 x y 4  1       8-15      64"
    assert inspect(strategy).splitlines()[-1] == row


def test_a_checkpoint_of_one_rank_lists_rank_0_for_every_tensor() -> None:
    assert {(row.ranks, row.stages) for row in holdings(single(small()))} == {((0,), (0,))}


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_ranks_are_those_that_hold_the_tensor(data: st.DataObject) -> None:
    strategy = data.draw(strategies(data.draw(tensors())))
    for row in holdings(strategy):
        layout = strategy.entries[row.name].layout
        assert list(row.ranks) == [r for r in range(strategy.grid.size) if layout.holds(r)]
