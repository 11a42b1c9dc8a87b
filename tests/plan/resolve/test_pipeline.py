"""Schedulers that do not work with other settings, and ``scheduler=auto``: the shortest simulated step."""

from __future__ import annotations

import pytest

from launcher.plan.plan import ask
from launcher.plan.resolve.pipeline import candidates, choose
from launcher.plan.schedule.simulate import Cost
from tests.plan.made import job, refusal, words

PIPE = "parallel.pipeline"
TWO = (f"{PIPE}.stages=2", "launch.nproc=2")
LEVEL3 = ("parallel.hsdp.optimizer_level=level3", "parallel.hsdp.shard_size=2", "launch.nproc=4")

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    **{f"{name} over level3": ((f"{PIPE}.scheduler={name}", *TWO, *LEVEL3), (
        f"parallel.hsdp.optimizer_level: level3: drops the weights after each forward and backward, and {name} "
        "computes weight gradients after that: FSDP2 would silently lose these gradients "
        "(try: parallel.hsdp.optimizer_level=level2)"
    )) for name in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")},
    "zero_bubble_h1, interleaved": ((f"{PIPE}.scheduler=zero_bubble_h1", *TWO, f"{PIPE}.interleave=true"), (
        f"{PIPE}.interleave: true: zero_bubble_h1 has one stage per rank (try: {PIPE}.interleave=false)"
    )),
    "zero_bubble_v of 3 chunks": (
        (f"{PIPE}.scheduler=zero_bubble_v", *TWO, f"{PIPE}.interleave=true", f"{PIPE}.chunks=3"),
        f"{PIPE}.chunks: 3: zero_bubble_v has exactly two virtual stages per rank (try: {PIPE}.chunks=2)",
    ),
    "less_memory of gpipe": (
        (f"{PIPE}.scheduler=gpipe", *TWO, f"{PIPE}.less_memory=true", f"{PIPE}.interleave=true"),
        f"{PIPE}.less_memory: true: only interleaved 1f1b supports it; the scheduler is gpipe "
        f"(try: {PIPE}.less_memory=false)",
    ),
    "less_memory, not interleaved": (
        (*TWO, f"{PIPE}.less_memory=true"),
        f"{PIPE}.less_memory: true: has no effect without several virtual stages per rank "
        f"(try: {PIPE}.interleave=true {PIPE}.chunks=2)",
    ),
    "pieces of one stage": (
        (f"{PIPE}.seq_chunks=2",),
        f"{PIPE}.seq_chunks: 2: pieces of a sequence fill the bubble between stages, but there is only one stage "
        f"(try: {PIPE}.seq_chunks=1)",
    ),
    "pieces in 1f1b": (
        (*TWO, f"{PIPE}.seq_chunks=2"),
        f"{PIPE}.seq_chunks: 2: the scheduler 1f1b does not support sequence chunks (try: {PIPE}.scheduler=seqpipe)",
    ),
    "seqvpp, not interleaved": (
        (*TWO, f"{PIPE}.seq_chunks=2", f"{PIPE}.scheduler=seqvpp"),
        f"{PIPE}.scheduler: seqvpp: needs several virtual stages per rank (try: {PIPE}.interleave=true "
        f"{PIPE}.chunks=2)",
    ),
    "seqvpp of more pieces than stages": (
        (*TWO, f"{PIPE}.seq_chunks=4", f"{PIPE}.scheduler=seqvpp", f"{PIPE}.interleave=true"),
        f"{PIPE}.seq_chunks: 4: seqvpp takes at most as many pieces as there are stages, 2 (try: {PIPE}.seq_chunks=2)",
    ),
    "seqsmartvpp of 3 stages": (
        (f"{PIPE}.stages=3", "launch.nproc=3", "train.batch_size=12", f"{PIPE}.scheduler=seqsmartvpp",
         f"{PIPE}.interleave=true"),
        f"{PIPE}.scheduler: seqsmartvpp: needs an even number of stages, not 3 (try: {PIPE}.scheduler=seqvpp)",
    ),
    "dualpipe_v of 3 micro batches": (
        (f"{PIPE}.scheduler=dualpipe_v", *TWO, f"{PIPE}.micro_batch_num=3", "train.batch_size=12"),
        f"{PIPE}.micro_batch_num: 3: too few; dualpipe_v needs at least as many as virtual stages, 4 "
        f"(try: {PIPE}.micro_batch_num=4)",
    ),
    "dualpipe_v of 1 micro batch": (
        (f"{PIPE}.scheduler=dualpipe_v", *TWO, f"{PIPE}.micro_batch_num=1", "train.batch_size=12"),
        f"{PIPE}.micro_batch_num: 1: too few; dualpipe_v needs at least as many as virtual stages, 4 "
        f"(try: {PIPE}.micro_batch_num=4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_a_scheduler_excludes_are_refused_and_the_cure_accepted(case: str) -> None:
    overrides, text = REFUSED[case]
    error = refusal(*overrides)
    assert str(error) == text
    ask(job(*overrides, *words(error)))


def test_one_stage_has_no_bubble_to_fill_whatever_the_scheduler() -> None:
    for name in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v"):
        asked = ask(job(f"{PIPE}.scheduler={name}", f"{PIPE}.interleave=true", f"{PIPE}.chunks=5"))
        assert (asked.sizes.places, asked.sizes.micros) == ((0,), 1)


def test_level3_that_shards_nothing_loses_nothing() -> None:
    ask(job(f"{PIPE}.scheduler=zero_bubble_v", *TWO, "parallel.hsdp.optimizer_level=level3"))


@pytest.mark.parametrize(("scheduler", "micros"), [("zero_bubble_v", 2), ("dualpipe_v", 4)])
def test_a_v_has_two_virtual_stages_a_rank_there_and_back(scheduler: str, micros: int) -> None:
    sizes = ask(job(f"{PIPE}.scheduler={scheduler}", *TWO)).sizes
    assert (sizes.places, sizes.micros, sizes.stages_of(0), sizes.stages_of(1)) == (
        (0, 1, 1, 0),
        micros,
        (0, 3),
        (1, 2),
    )


FOUR = (f"{PIPE}.scheduler=auto", f"{PIPE}.stages=4", f"{PIPE}.micro_batch_num=8", "launch.nproc=4")
SHARDED = ("parallel.hsdp.optimizer_level=level3", "parallel.hsdp.shard_size=2", "launch.nproc=8")


def flat(stages: int) -> Cost:
    return Cost((1.0,) * stages, (2.0,) * stages, (1,) * stages)


@pytest.mark.parametrize(("more", "names"), [
    ((), ("gpipe", "1f1b", "zero_bubble_h1")),
    ((f"{PIPE}.interleave=true",), ("gpipe", "1f1b", "zero_bubble_v", "dualpipe_v")),
    ((f"{PIPE}.interleave=true", f"{PIPE}.micro_batch_num=4"), ("gpipe", "1f1b", "zero_bubble_v")),
    ((f"{PIPE}.interleave=true", f"{PIPE}.chunks=3"), ("gpipe", "1f1b")),
    ((f"{PIPE}.seq_chunks=2",), ("seqpipe",)),
    ((f"{PIPE}.seq_chunks=4", f"{PIPE}.interleave=true"), ("seqpipe", "seqvpp", "seqsmartvpp")),
    (SHARDED, ("gpipe", "1f1b")),
], ids=["one stage per rank", "two", "few micro batches", "three", "pieces", "pieces of two", "level3"])  # fmt: skip
def test_auto_takes_only_what_is_legal_with_the_other_settings(more, names) -> None:
    j = job(*FOUR, *more)
    assert candidates(j, ask(j).sizes) == names


def test_auto_takes_the_shortest_step_and_says_what_it_compared() -> None:
    j = job(*FOUR)
    found = choose(j, ask(j).sizes, flat(4))
    assert (found.scheduler, found.sizes.places) == ("zero_bubble_h1", (0, 1, 2, 3))
    (note,) = found.notes
    assert str(note) == f"{PIPE}.scheduler auto -> zero_bubble_h1: bubble 13.0% simulated; gpipe 27.9%, 1f1b 29.0%"


def test_of_equally_short_steps_auto_takes_the_one_that_holds_less() -> None:
    j = job(*FOUR, *SHARDED)
    assert choose(j, ask(j).sizes, flat(4)).scheduler == "1f1b"


def test_auto_places_the_stages_as_its_choice_wants_them() -> None:
    j = job(*FOUR, f"{PIPE}.interleave=true")
    found = choose(j, ask(j).sizes, flat(8))
    assert (found.scheduler, found.sizes.places) == ("zero_bubble_v", (0, 1, 2, 3, 3, 2, 1, 0))


def test_auto_of_one_stage_is_1f1b() -> None:
    j = job(f"{PIPE}.scheduler=auto")
    assert choose(j, ask(j).sizes, flat(1)).scheduler == "1f1b"
