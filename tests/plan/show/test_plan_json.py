from __future__ import annotations

import json

from launcher.plan.show.plan_json import as_json
from tests.plan.show.test_text import HUNDRED, hundred


def test_the_json_has_a_version_and_what_the_text_says() -> None:
    plan = hundred()
    stored = json.loads(as_json(plan))
    assert next(iter(stored)) == "version"
    assert (stored["version"], stored["name"], stored["precision"], stored["seed"]) == (1, "hundred", "fp32", 0)
    sizes = stored["sizes"]
    assert sizes["grid"]["axes"] == [["pp", 4], ["dp_replicate", 2], ["dp_shard", 8], ["tp", 1]]
    assert (sizes["replicas"], sizes["micros"], sizes["micro_batch"], sizes["steps"]) == (16, 8, 4, 200)
    assert (stored["scheduler"], sizes["places"]) == ("1f1b", [0, 1, 2, 3])
    assert stored["schedule"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert f"{stored['timeline']['bubble']:.1%}" in HUNDRED
    assert (stored["timeline"]["messages"], stored["timeline"]["in_flight"]) == (48, [4, 3, 2, 1])
    assert [s["modules"][0] for s in stored["stages"]] == ["embed", "layers.24", "layers.50", "layers.76"]
    assert stored["boundaries"][0][0]["specs"] == [{"shape": [2, 4], "dtype": "float32"}]
    assert stored["ties"] == [{"name": "embed.weight", "stages": [0, 3], "ranks": [0, 3], "trained": True}]
    assert stored["params"][0]["names"] == ["embed.weight", "head.weight"]
    assert (stored["params"][0]["split"], stored["params"][0]["at"]) == ([["dp_shard"], []], [["pp", [0, 3]]])
    assert stored["hsdp"] == {"shard_size": 8, "threshold": 1, "optimizer_level": "level2", "uneven": "pad"}
    assert (len(stored["groups"]), len(stored["buckets"]), len(stored["memory"])) == (102, 4, 64)
    assert stored["memory"][0]["total"] == plan.estimate.memory[0].total
    assert stored["phases"][0] == {"where": "ranks", "steps": ["train", "evaluate", "save"]}
    assert [s["status"] for s in stored["settings"]] == ["applied"]
    assert [f"{n['key']} {n['text']}" for n in stored["notes"]] == [str(n) for n in plan.notes]


def test_the_json_has_a_line_an_item() -> None:
    written = as_json(hundred())
    assert sum(row.startswith('  {"name": "layers.') for row in written.splitlines()) == 300
    assert max(written.count(f'\n "{key}": ') for key in ("version", "stages", "params", "memory", "notes")) == 1
