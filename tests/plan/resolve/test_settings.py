from __future__ import annotations

import re

import pytest

from launcher.plan import resolve
from launcher.plan.plan import ask
from launcher.plan.resolve.hsdp import LEVELS
from tests.plan.made import job, refusal, words

P = "parallel"
PIPE = "parallel.pipeline"

REFUSED = {
    f"{P}.mode=sharding_propagation":
        f"{P}.mode: sharding_propagation has nothing to decide: each stage has one rank (try: {P}.mode=semi_auto)",
    f"{P}.mode=recursive_programming launch.nproc=4 {P}.operators.head={{in: [[1,1,1],[4,1]]}}":
        f"{P}.mode: recursive_programming chooses every strategy and would ignore those of parallel.operators; "
        f"sharding_propagation keeps them (try: {P}.mode=sharding_propagation)",
    "checkpoint.encrypt=aes-gcm":
        "checkpoint.encrypt: this does not say where the key is; never put the key itself into a configuration "
        "(try: checkpoint.encrypt=env:CHECKPOINT_KEY)",
}  # fmt: skip


def apart(text: str) -> list[str]:
    """Split overrides at spaces, but not inside braces."""
    return re.findall(r"(?:[^\s{]|\{.*?\})+", text)


def typed(text: str) -> list[str]:
    """Split overrides at each space that is followed by a section."""
    return re.split(r" (?=launch\.|parallel\.)", text)


@pytest.mark.parametrize("override", REFUSED)
def test_impossible_settings_are_refused_and_the_cure_accepted(override: str) -> None:
    error = refusal(*typed(override))
    assert str(error) == REFUSED[override]
    ask(job(*typed(override), *words(error)))


def test_everything_wrong_is_said_at_once() -> None:
    error = refusal("checkpoint.encrypt=aes-gcm", "launch.nproc=3", f"{PIPE}.stages=2", "steps=[train,transform]")
    assert [p.key for p in error.problems] == ["checkpoint.encrypt", "launch.nproc", "steps.transform"]


HSDP = "launch.nproc=2 parallel.hsdp={}"
BECOMES = {
    "": [],
    "deterministic=true": ["deterministic=true: applied, torch picks deterministic kernels or fails"],
    f"{PIPE}.interleave=true launch.nproc=2 {PIPE}.stages=2":
        [f"{PIPE}.interleave=true: applied, 2 virtual stages per rank"],
    f"{PIPE}.interleave=true": [f"{PIPE}.interleave=true: satisfied, one stage has no bubble to shrink"],
    f"{PIPE}.interleave=true {PIPE}.chunks=1 launch.nproc=2 {PIPE}.stages=2":
        [f"{PIPE}.interleave=true: satisfied, each rank has one chunk"],
    f"{PIPE}.scheduler=zero_bubble_v":
        [f"{PIPE}.scheduler=zero_bubble_v: satisfied, one stage has no bubble to fill, so it runs as 1f1b"],
    f"{PIPE}.interleave=true {PIPE}.less_memory=true launch.nproc=2 {PIPE}.stages=2": [
        f"{PIPE}.interleave=true: applied, 2 virtual stages per rank",
        f"{PIPE}.less_memory=true: applied, a rank runs ahead by one forward and waits for each transfer",
    ],
    f"{PIPE}.output_broadcast=true launch.nproc=2 {PIPE}.stages=2": [
        f"{PIPE}.output_broadcast=true: applied, evaluation broadcasts the output of the last stage to every stage, "
        "once per batch",
    ],
    f"{PIPE}.output_broadcast=true": [f"{PIPE}.output_broadcast=true: satisfied, there is only one stage"],
    f"{PIPE}.loss_reduction=sum {PIPE}.micro_batch_num=4":
        [f"{PIPE}.loss_reduction=sum: applied, loss and gradients are summed over 4 micro batches"],
    f"{PIPE}.loss_reduction=sum": [f"{PIPE}.loss_reduction=sum: satisfied, there is only one micro batch"],
    HSDP: [f"{P}.hsdp.optimizer_level=level1: applied, {LEVELS['level1']}"],
    f"{HSDP} {P}.hsdp.optimizer_level=level2":
        [f"{P}.hsdp.optimizer_level=level2: applied, gradients are sharded too and reduced after every micro batch"],
    f"{HSDP} {P}.hsdp.optimizer_level=level3":
        [f"{P}.hsdp.optimizer_level=level3: applied, {LEVELS['level3']}"],
    f"{P}.hsdp={{}}":
        [f"{P}.hsdp.optimizer_level=level1: satisfied, the shard axis has one rank, so nothing is sharded"],
    f"{P}.gradients_mean=false launch.nproc=4":
        [f"{P}.gradients_mean=false: applied, gradients are summed over the 4 data-parallel ranks"],
    f"{P}.gradients_mean=false": [f"{P}.gradients_mean=false: satisfied, one data-parallel rank"],
    f"{P}.dataset_strategy=full_batch launch.nproc=4":
        [f"{P}.dataset_strategy=full_batch: applied, each data-parallel rank reads the full batch, 32 samples, and "
         "keeps its slice of 8"],
    f"{P}.dataset_strategy=full_batch":
        [f"{P}.dataset_strategy=full_batch: satisfied, one data-parallel rank reads every sample"],
    f"{P}.dataset_strategy=[[4,1],[4,1]] launch.nproc=4":
        [f"{P}.dataset_strategy=[[4,1],[4,1]]: applied, each data-parallel rank reads its own part, as with "
         "data_parallel"],
    f"{P}.dataset_strategy=[[2,1],[2,1]] launch.nproc=4":
        [f"{P}.dataset_strategy=[[2,1],[2,1]]: applied, each data-parallel rank reads one of 2 parts, 16 samples, and "
         "keeps its slice of 8"],
    f"{P}.shared=[[embed.weight,head.weight]]":
        [f"{P}.shared=embed.weight=head.weight: satisfied, these are the ties of the model"],
    f"{P}.param_strategy.save=p.json":
        [f"{P}.param_strategy.save=p.json: applied, layouts of trainable parameters are written before the first step"],
    f"{P}.param_strategy.load=p.json {P}.param_strategy.only_trainable=false":
        [f"{P}.param_strategy.load=p.json: applied, all parameters and buffers get the layouts of the file; "
         "operators, tp and shards that are not set follow from it"],
    f"{P}.operator_strategy.save=/o.json":
        [f"{P}.operator_strategy.save=/o.json: applied, strategies of the operators that are cut are written before "
         "the first step"],
    f"{P}.group_file=g.json":
        [f"{P}.group_file=g.json: applied, the ranks of each group are written before the first step"],
    "checkpoint.async=true checkpoint.every=2": [
        "checkpoint.async=true: applied, a thread writes checkpoints from a copy in host memory; training waits only "
        "for that copy",
    ],
    "checkpoint.encrypt=env:KEY": [
        "checkpoint.encrypt=env:KEY: applied, tensor files are encrypted with AES-256-GCM, the manifest has a MAC of "
        "the same key; names, shapes and digests of tensors stay readable",
    ],
    "checkpoint.accept_plain=true": [
        "checkpoint.accept_plain=true: satisfied, without checkpoint.encrypt every checkpoint is read"
    ],
    "checkpoint.encrypt=env:KEY checkpoint.accept_plain=true": [
        "checkpoint.encrypt=env:KEY: applied, tensor files are encrypted with AES-256-GCM, the manifest has a MAC of "
        "the same key; names, shapes and digests of tensors stay readable",
        "checkpoint.accept_plain=true: applied, checkpoints that are not encrypted are read too, "
        "unverified",
    ],
    "checkpoint.async=true": ["checkpoint.async=true: satisfied, nothing is saved while training"],
    f"{P}.local_norm.print=true":
        [f"{P}.local_norm.print=true: applied, one number per parameter, every step: norms of the gradients of a "
         "rank's own "
         "samples; the only data-parallel rank has all samples"],
    f"{P}.local_norm={{dump: norms, device: true}} train.log_every=5 launch.nproc=2":
        [f"{P}.local_norm.dump=norms: applied, one number per rank, every 5 steps, in rank<N>.jsonl: norms of the "
         "gradients of a rank's own samples, before the sum over 2 data-parallel ranks"],
    f"{P}.local_norm.print=true {HSDP} {P}.hsdp.optimizer_level=level2 {PIPE}.micro_batch_num=4":
        [f"{P}.hsdp.optimizer_level=level2: applied, gradients are sharded too and reduced after every micro batch",
         f"{P}.local_norm.print=true: degraded, one number per parameter, every step: norms of the gradients of a "
         "rank's own "
         "samples, "
         "before the sum over 2 data-parallel ranks; level2 reduces sharded gradients after each of 4 micro batches, "
         "so their norm is the root of the summed squares, not the norm of the sum"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", BECOMES)
def test_every_switch_says_what_became_of_it(overrides: str) -> None:
    j = job(*apart(overrides))
    found = resolve.rows(j, ask(j).sizes)
    assert [f"{s.key}={s.value}: {s.status}, {s.why}" for s in found] == BECOMES[overrides]
