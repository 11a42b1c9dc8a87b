"""A named tuple, a list or a dictionary of a user's class arrives as such on the next stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import assert_parity, own


@pytest.mark.parametrize("kind", ["Pair", "Several", "Named"])
def test_a_users_container_keeps_its_class_on_the_next_stage(kind: str) -> None:
    model = {"_target_": "tests.parallel.container_nets.Net", "kind": kind}
    pipeline: dict[str, Any] = {"stages": 2, "micro_batch_num": 2, "stage_config": {"[ab]": 0, "c": 1}}
    assert_parity(own("container_nets.Net", [6], stages=1, model=model, parallel={"pipeline": pipeline}))
