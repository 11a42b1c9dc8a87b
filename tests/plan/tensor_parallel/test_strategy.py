from __future__ import annotations

from launcher.plan.tensor_parallel.strategy_reader import degree


def test_the_size_of_tp_is_that_of_the_slices():
    assert degree({"up": {"in": [[4, 1], [1, 2]]}, "norm": {"input": [None, "tp"]}}) == (2, "")
    assert degree({"up": {"layout": {"device_matrix": [2, 4], "alias_name": ["a", "b"]}}}) == (4, "")
    assert degree({"up": {"weight": ["tp", None]}}) == (None, "")
    assert degree({"up": {"in": [[1, 2], [2, 1]]}, "head": {"in": [[1], [3]]}}) == (None, "2 in up but 3 in head")
