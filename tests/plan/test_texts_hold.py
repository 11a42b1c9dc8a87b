"""What a plan says about sharding, messages and reductions is true of its values.

``tests.parallel.test_traffic`` compares the traffic with the collectives of real steps.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from random import Random
from typing import Any

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.show.text import SHORT, short, text
from launcher.planner.plan_job import plan_job
from tests.parity import job

MEGATRON = {
    "embed": {"weight": ["tp", None]}, "layers.*.attn.[qkv]": {"weight": ["tp", None]},
    "layers.*.attn.o": {"weight": [None, "tp"]}, "layers.*.mlp.gate": {"weight": ["tp", None]},
    "layers.*.mlp.up": {"weight": ["tp", None]}, "layers.*.mlp.down": {"weight": [None, "tp"]},
    "head": {"weight": ["tp", None]},
}  # fmt: skip
EMBED = {"embed": {"weight": ["tp", None]}}
DOWN = {"layers.*.mlp.down": {"weight": [None, "tp"]}}
UP = {"layers.*.mlp.up": {"weight": ["tp", None], "output": [None, None, None]}}
STRATEGIES = ("data_parallel", "full_batch", [[1, 1], [1, 1]])
SWITCHES = {
    "grad_matmul_communication_overlap": True,
    "allreduce_and_biasadd_swap": True,
    "enable_communication_fusion": True,
    "grad_computation_allreduce_overlap": True,
    "computation_allgather_overlap": True,
}
KB = 1 / 1024
PIPES: tuple[dict[str, Any], ...] = (
    {"micro_batch_num": 1},
    {"micro_batch_num": 4},
    {"stages": 2, "scheduler": "gpipe"},
    {"stages": 2, "micro_batch_num": 4},
    {"stages": 2, "interleave": True, "micro_batch_num": 4},
    {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4},
    {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4},
    {"stages": 2, "scheduler": "dualpipe_v"},
    {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2},
    {"stages": 2, "scheduler": "seqvpp", "interleave": True, "seq_chunks": 2},
)
SPLIT = ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
"""Schedulers that level3 refuses."""
FUSION: tuple[dict[str, Any], ...] = (
    {},
    {"openstate": False},
    {"allreduce": {"mode": "index", "config": [3, 11]}},
    {"allreduce": {"mode": "size", "config": KB / 8}, "allgather": {"mode": "size", "config": 30 * KB}},
    {"reducescatter": {"mode": "size"}},
    {"network": {"latency_us": 1, "gb_per_s": 1.5}},
    {"network": {"latency_us": 1, "gb_per_s": 1.5}, "allreduce": {"mode": "size"}, "allgather": {"mode": "size"}},
)
SHARDS = (None, *product(("level1", "level2", "level3"), (0, 1, 65536)))
DATA: tuple[dict[str, Any], ...] = ({}, {"dp_replicate": 2})
DEVICES = ("cpu", "npu", "auto")
PRECISIONS = ("fp32", "bf16")


def drawn(seed: int) -> Job:
    """Return a random request, each part of it drawn independently."""
    rng = Random(seed)
    pipe, shards = rng.choice(PIPES), rng.choice(SHARDS)
    if shards is not None and pipe.get("scheduler") in SPLIT:
        shards = (min(shards[0], "level2"), shards[1])
    hsdp = None if shards is None else {"shard_size": 2, "optimizer_level": shards[0], "threshold": shards[1]}
    operators = {} if "seq_chunks" in pipe else rng.choice([{}, {}, {}, UP, DOWN, EMBED, MEGATRON])
    parallel = {
        "operators": operators, "dataset_strategy": rng.choice(STRATEGIES),
        "pipeline": {**pipe, "loss_reduction": rng.choice(["mean", "sum"])}, "hsdp": hsdp,
        "grid": rng.choice(DATA) | ({"tp": 2} if operators else {}),
        "comm_fusion": rng.choice(FUSION), 
        "transformer_opt": SWITCHES | {"dataset_broadcast_opt_level": rng.choice([0, 1, 2, 3])},
        "gradient_fp32_sync": rng.choice([True, False]),
        "local_norm": {"print": True}, "gradients_mean": rng.choice([True, False]),
    }  # fmt: skip
    tied = not operators and rng.choice([True, False])
    return job(parallel=parallel, launch__device=rng.choice(DEVICES), train__precision=rng.choice(PRECISIONS),
               model__tied=tied, data__seq_len=8, train__batch_size=16)  # fmt: skip


@dataclass(frozen=True)
class Said:
    """The settings of a plan by the last part of their keys, and the values of the plan."""

    job: Job
    plan: Plan

    @cached_property
    def rows(self) -> dict[str, tuple[str, str]]:
        return {s.key.removeprefix("parallel.").rpartition("opt.")[2]: (s.status, s.why) for s in self.plan.settings}

    def most(self, kind: str) -> int:
        """The most collectives of ``kind`` on any rank."""
        return max((t.count for t in self.plan.estimate.traffic if t.kind == kind), default=0)

    @cached_property
    def each(self) -> int:
        """The most groups on any rank."""
        places = self.plan.sizes.places
        return max(Counter(places[g.stage] for g in self.plan.groups).values(), default=0)

    @cached_property
    def scatters(self) -> int:
        """The number of times that a group is reduced in a step."""
        if self.plan.scatters:
            return 1
        return self.most("reduce_scatter") // max(self.each, 1)

    @cached_property
    def together(self) -> int:
        """The most parameters in one bucket."""
        return max((len(b.names) for b in self.plan.buckets), default=0)


LOOKED_FOR, READ = set[str](), set[str]()
"""The phrases that the laws look for, and those of plans: a law must not pass because a text was reworded."""


def matched(pattern: str, said: str) -> re.Match[str] | None:
    LOOKED_FOR.add(pattern)
    if found := re.search(pattern, said):
        READ.add(pattern)
    return found


def says(phrase: str, said: str) -> bool:
    return matched(re.escape(phrase), said) is not None


def holds_of_the_level(s: Said) -> None:
    status, why = s.rows.get("hsdp.optimizer_level", ("", ""))
    if not status:
        assert s.job.parallel.hsdp is None
    elif s.most("all_gather") == 0:
        assert (status, any(p.sharded for p in s.plan.params)) == ("degraded", False)
        assert why.startswith("no parameter is sharded: the largest has ")
        assert "hsdp" not in text(s.plan) or matched(r"hsdp +level.: no parameter is sharded over", text(s.plan))
    else:
        assert status == "applied"
        often = s.plan.sizes.micros * s.plan.sizes.pieces
        assert s.scatters == (
            1 if says("once a step", why) else often if says("every", why) or "level3" in str(s.job) else 0
        )
        assert says("piece of a micro batch", why) == (s.plan.sizes.pieces > 1 and says("every", why))


def holds_of_fusion(s: Said) -> None:
    status, why = s.rows["enable_communication_fusion"]
    assert (status == "degraded") == (not s.job.parallel.comm_fusion.openstate)
    if status == "degraded":
        assert s.together <= 1
        return
    assert says("nothing is summed", why) == (not s.plan.groups and not s.plan.buckets)
    assert says("unsharded gradients", why) == bool(s.plan.buckets)
    assert says("group", why) == bool(s.plan.groups)
    asked = s.job.parallel.comm_fusion.allreduce
    assert says("that end before the parameters", why) == (
        asked is not None and asked.mode == "index" and s.together > 0
    )
    if found := matched(r"buckets of ([\d.]+) (B|KB|MB)", why):
        limit = float(found[1]) * {"B": 1, "KB": 1 << 10, "MB": 1 << 20}[found[2]]
        assert all(len(b.names) == 1 or b.nbytes <= limit * 1.05 for b in s.plan.buckets)


def holds_of_gathers(s: Said) -> None:
    status, why = s.rows["computation_allgather_overlap"]
    count = s.most("all_gather")
    assert says("nothing is gathered", why) == (count == 0)
    assert says("once a step", why) == (0 < count == s.each)
    assert (status == "satisfied") == (count == 0 or (count > s.each > 1 and s.job.launch.device == "npu"))
    assert (status == "applied") == any(t.until > n + 1 for turns in s.plan.gathers for n, t in enumerate(turns))
    assert says("CPU waits", why) <= (s.job.launch.device == "cpu")


def holds_of_reductions(s: Said) -> None:
    status, why = s.rows["grad_computation_allreduce_overlap"]
    travels = bool(s.plan.buckets) or s.most("reduce_scatter") > 0
    assert says("no gradient is sent", why) == (not travels)
    assert says("CPU waits", why) <= (s.job.launch.device == "cpu")
    if says("gradients are reduced after the last backward of a step", why):
        assert s.scatters <= 1
    if status == "applied":
        places = s.plan.sizes.places
        assert max(Counter(places[b.stage] for b in s.plan.scatters).values()) > 1
        assert s.plan.reduces_early
        assert not s.plan.buckets
    if status == "satisfied" and travels:
        level = s.job.parallel.hsdp.optimizer_level if s.job.parallel.hsdp else ""
        assert s.job.launch.device == "npu"
        assert level > "level1"
        assert not s.plan.buckets
        assert not any(a.kind == "W" for row in s.plan.schedule for a in row)
    if found := matched(r", but (\d+) unsharded parameter", why):
        assert int(found[1]) == len({n for b in s.plan.buckets for n in b.names})


def holds_of_transport(s: Said) -> None:
    for name in ("allgather", "reducescatter"):
        status, why = s.rows.get(f"comm_fusion.{name}", ("", ""))
        assert says("nothing is sharded", why) == (status != "" and not s.plan.groups)
    status, why = s.rows.get("comm_fusion.allreduce", ("", ""))
    if status and s.plan.sizes.replicas > 1:
        assert (status == "satisfied") == (not s.plan.buckets)
        assert (status == "degraded") == bool(
            s.plan.buckets and s.plan.groups and s.plan.sizes.grid["dp_replicate"] > 1
        )
    status, why = s.rows.get("comm_fusion.openstate", ("", ""))
    if status == "applied":
        assert says("is gathered", why) == bool(s.plan.groups)
        assert says("reduced by itself", why) == bool(s.plan.buckets)
    status, _ = s.rows.get("comm_fusion.network", ("", ""))
    if status == "applied":
        asked = s.job.parallel.comm_fusion
        assert (asked.allreduce is None and s.plan.buckets) or (asked.allgather is None and s.plan.groups)
    _, why = s.rows.get("gradient_fp32_sync", ("", ""))
    if says("sent in bfloat16", why):
        assert says("tied parameters", why) == any(len(t.ranks) > 1 and t.trained for t in s.plan.ties)
        assert ("over tp" in why) == bool(s.plan.sums)  # no layout here has any


def holds_of_operators(s: Said) -> None:
    comms = [c for spread in s.plan.operators.spreads for c in spread.comms]
    status, why = s.rows["grad_matmul_communication_overlap"]
    assert (status == "applied") == bool(s.plan.operators.overlapped)
    assert says("anything", why) == (bool(comms) and not any(c.phase == "backward" for c in comms))
    assert (status == "degraded") == says("the second half of a backward", why)
    if found := matched(r"of (\d+) matmul", why):
        products = [x for x in s.plan.operators.spreads if x.operator.mode in ("column", "row")]
        assert int(found[1]) == sum(any(c.phase == "backward" for c in x.comms) for x in products)
    assert says("no operator is cut", why) == (not s.plan.operators.spreads)
    status, why = s.rows["allreduce_and_biasadd_swap"]
    assert (status, says("no operator", why)) == ("satisfied", True)  # the model has no bias


def holds_of_reading(s: Said) -> None:
    grid, status = s.plan.sizes.grid, s.rows["dataset_broadcast_opt_level"]
    pairs = [s.plan.batch_roles(r) for r in range(grid.size)]
    reads = [(r, sum(hand.reads for hand in pair)) for r, pair in enumerate(pairs) if any(h.reads for h in pair)]
    readers = len(reads) // s.plan.sizes.replicas
    users = sum(any(h.uses for h in pair) for pair in pairs) // s.plan.sizes.replicas
    sends = any(hand.gives for pair in pairs for hand in pair)
    assert sends == (says("send", status[1]) or (says("reads for its tensor", status[1]) and grid["tp"] > 1))
    if status[0] == "satisfied":
        assert (users, readers) == (1, 1)
    elif says("one rank of a", status[1]):
        assert readers == 1 < users
    elif says("for itself", status[1]):
        assert readers == users
    elif says("one rank reads for its tensor-parallel group", status[1]):
        assert readers == users // grid["tp"]
    else:
        assert readers == users // 2
    asked = s.rows.get("dataset_strategy")
    if asked is not None and asked[0] == "applied":
        assert says("the full batch", asked[1]) == (s.plan.reading.parts == 1)


def holds_of_the_rest(s: Said) -> None:
    status, why = s.rows.get("pipeline.loss_reduction", ("", ""))
    assert (status == "applied") == (s.plan.loss_terms > 1)
    assert status != "applied" or str(s.plan.loss_terms) in why
    status, why = s.rows["local_norm.print"]
    assert (status == "degraded") == (s.scatters > 1)
    for note in s.plan.notes:
        if note.key == "parallel.hsdp.threshold":
            small = int(re.findall(r"\d+", note.text)[1])
            assert small == len({n for b in s.plan.buckets for n in b.names})
            assert says("together", note.text) == s.job.parallel.comm_fusion.openstate


def holds_of_the_picture(s: Said) -> None:
    shown, grid, places = text(s.plan), s.plan.sizes.grid, s.plan.sizes.places
    if found := matched(r"(\d+) messages? a step", shown):
        pipeline = set(grid.peers(0, "pp"))
        assert int(found[1]) == sum(t.count for t in s.plan.estimate.traffic if t.kind == "send" and t.rank in pipeline)
    inside = any(a == b for a, b in pairwise(places))
    assert says("handed on within the rank", " ".join(shown.split())) == inside
    assert ": 0 parameters over" not in shown


def holds_of_the_page(s: Said) -> None:
    whole, page = text(s.plan).splitlines(), short(s.plan).splitlines()
    assert min(len(whole), SHORT) <= len(page) <= len(whole)
    assert {row[:12] for row in whole} == {row[:12] for row in page}
    for row in s.plan.settings:
        if row.status == "degraded":
            assert any(f"{row.key}={row.value}: degraded" in line for line in page)


LAWS = (
    holds_of_the_level, holds_of_fusion, holds_of_gathers, holds_of_reductions, holds_of_transport, holds_of_operators,
    holds_of_reading, holds_of_the_rest, holds_of_the_picture, holds_of_the_page,
)  # fmt: skip


def test_the_text_of_a_plan_is_true_of_its_values() -> None:
    for seed in range(40):
        j = drawn(seed)
        said = Said(j, plan_job(j))
        for holds in LAWS:
            try:
                holds(said)
            except AssertionError as error:
                raise AssertionError(f"{holds.__name__}, seed {seed}") from error
    assert not LOOKED_FOR - READ
