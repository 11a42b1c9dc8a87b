"""A weight whose result nothing trains has no gradient under any layout: zeros would decay it."""

from __future__ import annotations

import pytest

from tests.parity import assert_parity, own

CUT = {"a": 0, "b": 0, "c": 1, "head": 1}
LAST = {"a": 0, "b": 0, "c": 0, "head": 1}
LEVEL3 = {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}
PIPE = {"stages": 2, "micro_batch_num": 2}
LAYOUTS = {
    "pp2": {"pipeline": {**PIPE, "stage_config": CUT}},
    "pp2, cut late": {"pipeline": {**PIPE, "stage_config": LAST}},
    "pp2 level3": {"pipeline": {**PIPE, "stage_config": CUT}, "hsdp": LEVEL3},
    "level3": {"hsdp": LEVEL3},
    "level1": {"hsdp": {**LEVEL3, "optimizer_level": "level1"}},
    "level3 recompute": {"hsdp": LEVEL3, "recompute": {"modules": ["b", "c"]}},
    "zero bubble": {"pipeline": {**PIPE, "scheduler": "zero_bubble_h1", "stage_config": CUT}},
    "replicas": {"grid": {"dp_replicate": 2}},
}
NETS = {
    "hidden": ("Hidden", {}),
    "ignored": ("Two", {"makes": "Pair", "takes": "TakesFirst"}),
    "mask": ("Two", {"makes": "Pair", "takes": "TakesMask"}),
    "detached": ("Two", {"makes": "Pair", "takes": "TakesDetached"}),
    "own backward": ("Two", {"makes": "Doubled", "takes": "TakesFirst"}),
    "hook": ("Two", {"makes": "Watched", "takes": "TakesFirst"}),
}


# FSDP2 calls the hook with None, as torch does for any result of a function that is not trained
CELLS = [(net, layout) for net in NETS for layout, p in LAYOUTS.items() if net != "hook" or "hsdp" not in p]


@pytest.mark.parametrize(("net", "layout"), CELLS)
def test_gradients_are_missing_where_they_are_in_one_process(net: str, layout: str) -> None:
    name, arguments = NETS[net]
    model = {"_target_": f"tests.parallel.unused_result_nets.{name}", **arguments}
    parallel = LAYOUTS[layout]
    job = own(f"unused_result_nets.{name}", [6], stages=1, model=model, parallel=parallel, train__batch_size=8)
    assert_parity(job)
