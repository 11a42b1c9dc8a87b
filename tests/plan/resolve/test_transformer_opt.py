"""The switches of parallel_speed_up.json: each has a status, and a wrong one is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.plan.plan import ask
from launcher.plan.resolve.transformer_opt import SWITCHES, rows
from launcher.plan.values.resolved import SwitchesFile
from launcher.planner.plan_job import check_without_torch, resolve_job
from launcher.planner.request_files import inlined
from tests.plan.made import chain, job, planned, refusal, skeleton, words

KEY = "parallel.transformer_opt"
TP2 = "launch.nproc=2 parallel.grid.tp=2 operators=megatron"
PP2 = "launch.nproc=2 parallel.pipeline.stages=2"
SHARDED = "launch.nproc=2 parallel.hsdp={}"
LEVEL2 = f"{SHARDED} parallel.hsdp.optimizer_level=level2"
LEVEL3 = f"{SHARDED} parallel.hsdp.optimizer_level=level3"
FUSION = "parallel.comm_fusion"
ONCE = "applied, weights are gathered once a step, ahead of use, and waited for where a group is used first"
UNCUT = "no operator is cut over tp, so this plan has no such collective"

BECOMES = {
    "recomputation_communication_overlap=true": "satisfied, no operator is cut over tp, so recomputation sends nothing",
    f"recomputation_communication_overlap=true {TP2}":
        "degraded, nothing is recomputed by the launcher; a model that checkpoints its own modules waits for their "
        "collectives again",
    f"recomputation_communication_overlap=true {TP2} parallel.recompute={{modules:'*'}}":
        "degraded, recomputation repeats collectives over tp and waits for them; parallel.recompute.comm=keep avoids "
        "this",
    f"recomputation_communication_overlap=true {TP2} parallel.recompute={{modules:'*',comm:keep}}":
        "applied, results of collectives over tp are kept: recomputation sends nothing",
    "grad_matmul_communication_overlap=AllReduce": f"satisfied, {UNCUT}",
    f"grad_matmul_communication_overlap=MorphReduceScatter {TP2}":
        "applied, input gradients of matmuls are sent while weight gradients are computed",
    "enable_communication_fusion=true":
        "satisfied, unsharded gradients are sent in buckets of 64 MB, sharded ones a group at a time",
    f"enable_communication_fusion=true {FUSION}.openstate=false":
        f"degraded, {FUSION}.openstate=false: each collective carries one module or one parameter",
    f"enable_communication_fusion=true {FUSION}.allreduce={{mode:index,config:[3,5]}}":
        "satisfied, unsharded gradients are sent in buckets that end before the parameters 3, 5, sharded ones a group "
        "at a time",
    f"enable_communication_fusion=true {FUSION}={{allgather:{{mode:size,config:2}},allreduce:{{mode:size,config:1}}}}":
        "satisfied, unsharded gradients are sent in buckets of 1.0 MB, sharded ones in groups of up to 2.0 MB",
    "grad_computation_allreduce_overlap=true": "satisfied, one data-parallel rank: no gradient is sent",
    "grad_computation_allreduce_overlap=true launch.nproc=2":
        "degraded, gradients are reduced after the last backward of a step",
    f"grad_computation_allreduce_overlap=true {SHARDED}":
        "applied, each bucket of a stage is sent while its last backward runs",
    f"grad_computation_allreduce_overlap=true {LEVEL2}":
        "degraded, FSDP2 reduces each group during backward where launch.device=auto finds an accelerator; on CPUs "
        "ranks wait",
    f"grad_computation_allreduce_overlap=true launch.device=cpu {LEVEL2}":
        "degraded, FSDP2 reduces each group during backward on accelerators only; the CPU waits",
    f"grad_computation_allreduce_overlap=true launch.device=cuda {LEVEL2}":
        "satisfied, FSDP2 reduces each group while backward runs the next",
    "computation_allgather_overlap=true": "satisfied, no weight is sharded: nothing is gathered",
    f"computation_allgather_overlap=true {SHARDED}": ONCE,
    f"computation_allgather_overlap=true launch.device=cuda {SHARDED}": ONCE,
    f"computation_allgather_overlap=true launch.device=cuda {LEVEL2}": ONCE,
    f"computation_allgather_overlap=true {LEVEL3}":
        "degraded, FSDP2 gathers the next group during this one's computation where launch.device=auto finds an "
        "accelerator; on CPUs ranks wait",
    f"computation_allgather_overlap=true launch.device=cpu {LEVEL3}":
        "degraded, FSDP2 gathers the next group during this one's computation on accelerators only; the CPU waits",
    f"computation_allgather_overlap=true launch.device=cuda {LEVEL3}":
        "satisfied, FSDP2 gathers the next group while this one computes",
    "computation_communication_fusion_level=3": f"satisfied, {UNCUT}",
    "dataset_broadcast_opt_level=3": "satisfied, each data-parallel rank is a single rank and reads for itself",
    f"dataset_broadcast_opt_level=0 {PP2}":
        "applied, the first stage reads inputs, the last stage targets; each tensor-parallel rank reads for itself",
    f"dataset_broadcast_opt_level=1 {PP2}":
        "applied, the first stage reads inputs and targets, and sends the targets to the last stage",
    f"dataset_broadcast_opt_level=2 {PP2}":
        "applied, the first stage reads inputs, the last stage targets; one rank reads for its tensor-parallel group",
    f"dataset_broadcast_opt_level=3 {PP2}":
        "applied, one rank of a pipeline and tensor-parallel group reads, and sends the others what they use",
    "allreduce_and_biasadd_swap=true": f"satisfied, {UNCUT}",
    "enable_allreduce_slice_to_reducescatter=true": f"satisfied, {UNCUT}",
    "enable_interleave_split_concat_branch=true": f"satisfied, {UNCUT}",
    "enable_interleave_parallel_branch=true": "degraded, branches run one after the other, on one stream",
}  # fmt: skip


def lines(typed: str) -> list[str]:
    j = job(*f"{KEY}.{typed}".split())
    return [f"{s.key}={s.value}: {s.status}, {s.why}" for s in rows(j, ask(j).sizes, None)]


@pytest.mark.parametrize("typed", BECOMES)
def test_every_switch_says_what_became_of_it(typed: str) -> None:
    assert lines(typed) == [f"{KEY}.{typed.split()[0]}: {BECOMES[typed]}"]


def test_a_switch_with_nothing_to_overlap_is_refused() -> None:
    why = "attention gathers no keys or values here, so there is nothing to overlap"
    key = f"{KEY}.grad_fa_allgather_overlap"
    assert str(refusal(f"{key}=true")) == f"{key}: true: {why} (try: {key}=false)"
    ask(job(f"{key}=true", *words(refusal(f"{key}=true"))))


def test_every_documented_switch_has_been_thought_of() -> None:
    refused = "grad_fa_allgather_overlap"
    assert {typed.split("=")[0] for typed in BECOMES} | {refused} == set(SWITCHES)
    assert len(SWITCHES) == 12


def test_strict_refuses_what_is_done_by_half() -> None:
    typed = [f"{KEY}.strict=true", f"{KEY}.grad_computation_allreduce_overlap=true", "launch.nproc=2"]
    key = f"{KEY}.grad_computation_allreduce_overlap"
    text = f"{key}: true: strict: gradients are reduced after the last backward of a step (try: {key}=false)"
    assert str(refusal(*typed)) == text
    ask(job(*typed, *words(refusal(*typed))))


LARGE = skeleton({"a.weight": (512, 64)})
SMALL = skeleton({"a.weight": (2,), "b.weight": (2,)})


def test_strict_waits_for_the_plan_where_that_decides() -> None:
    """Which weights a plan shards is known only after the model is read."""
    typed = [f"{KEY}.strict=true", f"{KEY}.computation_allgather_overlap=true", *SHARDED.split()]
    key = f"{KEY}.computation_allgather_overlap"
    with pytest.raises(RequestError) as caught:
        planned(job(*typed), LARGE, chain("a"))
    why = "each rank has one group, gathered once a step before it computes"
    assert str(caught.value) == f"{key}: true: strict: {why} (try: {key}=false)"
    planned(job(*typed, *words(caught.value)), LARGE, chain("a"))
    made = planned(job(*typed), SMALL, chain("a", "b"))
    assert [s.why for s in made.settings if s.key == key] == ["no weight is sharded: nothing is gathered"]


def test_switches_that_are_off_say_nothing() -> None:
    off = {name: 0 if "level" in name and "broadcast" not in name else False for name in SWITCHES}
    del off["dataset_broadcast_opt_level"]
    j = job(*(f"{KEY}.{name}={str(value).lower()}" for name, value in off.items()))
    assert list(rows(j, ask(j).sizes, None)) == []


WRONG = {
    "strikt=true": f"strikt: unknown switch, did you mean 'strict'? (try: '~{KEY}.strikt' {KEY}.strict=true)",
    "matmul_grad_comm_overlap=true":
        "matmul_grad_comm_overlap: unknown switch, did you mean 'grad_matmul_communication_overlap'? "
        f"(try: '~{KEY}.matmul_grad_comm_overlap' {KEY}.grad_matmul_communication_overlap=true)",
    "zzz=1": f"zzz: unknown switch (options: {', '.join(SWITCHES)}) (try: '~{KEY}.zzz')",
    "computation_allgather_overlap=1":
        "computation_allgather_overlap: 1: should be true or false "
        f"(try: {KEY}.computation_allgather_overlap=false)",
    "dataset_broadcast_opt_level=4":
        "dataset_broadcast_opt_level: 4: should be a whole number from 0 to 3 "
        f"(try: {KEY}.dataset_broadcast_opt_level=0)",
    "dataset_broadcast_opt_level=true":
        "dataset_broadcast_opt_level: true: should be a whole number from 0 to 3 "
        f"(try: {KEY}.dataset_broadcast_opt_level=0)",
    "grad_matmul_communication_overlap=2":
        "grad_matmul_communication_overlap: 2: should be true, false or some of "
        "AllReduce,ReduceScatter,AllGather,AlltoAll "
        f"(try: {KEY}.grad_matmul_communication_overlap=false)",
}  # fmt: skip


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_switch_is_refused_and_the_cure_accepted(typed: str) -> None:
    error = refusal(f"{KEY}.{typed}")
    assert str(error) == f"{KEY}.{WRONG[typed]}"
    ask(job(f"{KEY}.{typed}", *words(error)))


FILE = """{
  "computation_allgather_overlap": true,
  "recompute_comm_overlap": false,
  "dataset_broadcast_opt_level": "2"
}
"""


def test_a_file_is_read_and_a_wrong_line_of_it_named(tmp_path: Path) -> None:
    path = tmp_path / "parallel_speed_up.json"
    path.write_text(FILE)
    with pytest.raises(RequestError) as caught:
        check_without_torch(resolve_job(job(f"{KEY}={path}")))
    assert str(caught.value).splitlines() == [
        f"{KEY}: {path}:3: unknown switch 'recompute_comm_overlap', "
        "did you mean 'recomputation_communication_overlap'?",
        f"{KEY}: {path}:4: dataset_broadcast_opt_level = 2: should be a whole number from 0 to 3",
    ]


def test_no_name_is_no_file() -> None:
    there, found = inlined(resolve_job(job(f"{KEY}=''")))
    assert (found, [*rows(there.job, ask(there.job).sizes, None)]) == ([], [])


def test_a_file_means_the_same_as_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "parallel_speed_up.json"
    path.write_text('{"computation_allgather_overlap": true}')
    resolved, found = inlined(resolve_job(job(f"{KEY}={path}")))
    there = resolved.job
    assert found == []
    typed = job(f"{KEY}.computation_allgather_overlap=true")
    assert [*rows(there, ask(there).sizes, None)] == [*rows(typed, ask(typed).sizes, None)]


def test_a_refused_switch_of_a_file_is_switched_off_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "parallel_speed_up.json"
    path.write_text('{"grad_fa_allgather_overlap": true, "computation_allgather_overlap": true}')
    with pytest.raises(RequestError) as caught:
        check_without_torch(resolve_job(job(f"{KEY}={path}")))
    why = "attention gathers no keys or values here, so there is nothing to overlap"
    cure = f"{KEY}={path} {KEY}.grad_fa_allgather_overlap=false"
    assert str(caught.value) == f"{KEY}: grad_fa_allgather_overlap = true: {why} (try: {cure})"
    resolved, found = inlined(resolve_job(job(*words(caught.value))))
    there = resolved.job
    assert found == []
    assert [s.key for s in rows(there, ask(there).sizes, None)] == [f"{KEY}.computation_allgather_overlap"]


def test_keys_count_beside_a_file_and_win_over_its_own(tmp_path: Path) -> None:
    path = tmp_path / "parallel_speed_up.json"
    path.write_text('{"dataset_broadcast_opt_level": 2, "computation_allgather_overlap": false}')
    typed = job(f"{KEY}={path}", f"{KEY}.dataset_broadcast_opt_level=1", f"{KEY}.strict=true")
    there, found = inlined(resolve_job(typed))
    assert found == []
    assert there.switches_file == SwitchesFile(str(path), frozenset({"dataset_broadcast_opt_level", "strict"}))
    assert there.job.parallel.transformer_opt == {
        "dataset_broadcast_opt_level": 1, "computation_allgather_overlap": False, "strict": True,
    }  # fmt: skip


def test_a_typed_strict_refuses_what_a_file_asks_for_by_half(tmp_path: Path) -> None:
    path = tmp_path / "parallel_speed_up.json"
    path.write_text('{"enable_interleave_parallel_branch": true}')
    typed = [f"{KEY}={path}", f"{KEY}.strict=true"]
    with pytest.raises(RequestError) as caught:
        check_without_torch(resolve_job(job(*typed)))
    name = "enable_interleave_parallel_branch"
    why = "strict: branches run one after the other, on one stream"
    assert str(caught.value) == f"{KEY}: {name} = true: {why} (try: {KEY}={path} {KEY}.{name}=false)"
    check_without_torch(resolve_job(job(*typed, *words(caught.value))))


def test_a_wrong_key_beside_a_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "parallel_speed_up.json"
    path.write_text("{}")
    with pytest.raises(RequestError) as caught:
        check_without_torch(resolve_job(job(f"{KEY}={path}", f"{KEY}.strikt=true")))
    assert str(caught.value).startswith(f"{KEY}.strikt: unknown switch, did you mean 'strict'?")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a": 1,\n}', ":2: not JSON: Expecting property name enclosed in double quotes"),
        (b"\xff", ": not JSON: it is not text"),
        (b"[]", ": should be an object: {switch: value}"),
        (None, ": cannot be read: No such file or directory"),
    ],
    ids=["not JSON", "no text", "no object", "no file"],
)
def test_files_that_are_no_parallel_speed_up_json_are_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "speed.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        check_without_torch(resolve_job(job(f"{KEY}={path}")))
    assert str(caught.value) == f"{KEY}: {path}{why}"
