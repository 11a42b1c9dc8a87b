"""``scheduler=auto``: the shortest simulated step among what is legal."""

from __future__ import annotations

import pytest

from launcher.plan.plan import ask
from launcher.plan.schedule.simulate import Cost
from launcher.plan.settings import legal
from launcher.plan.settings.scheduler import choose
from tests.plan.made import job

PIPE = "parallel.pipeline"
FOUR = (f"{PIPE}.scheduler=auto", f"{PIPE}.stages=4", f"{PIPE}.micro_batch_num=8", "launch.nproc=4")
LEVEL3 = ("parallel.hsdp.optimizer_level=level3", "parallel.hsdp.shard_size=2", "launch.nproc=8")


def flat(stages: int) -> Cost:
    return Cost((1.0,) * stages, (2.0,) * stages, (1,) * stages)


@pytest.mark.parametrize(("more", "names"), [
    ((), ("gpipe", "1f1b", "zero_bubble_h1")),
    ((f"{PIPE}.interleave=true",), ("gpipe", "1f1b", "zero_bubble_v", "dualpipe_v")),
    ((f"{PIPE}.interleave=true", f"{PIPE}.micro_batch_num=4"), ("gpipe", "1f1b", "zero_bubble_v")),
    ((f"{PIPE}.interleave=true", f"{PIPE}.chunks=3"), ("gpipe", "1f1b")),
    ((f"{PIPE}.seq_chunks=2",), ("seqpipe",)),
    ((f"{PIPE}.seq_chunks=4", f"{PIPE}.interleave=true"), ("seqpipe", "seqvpp", "seqsmartvpp")),
    (LEVEL3, ("gpipe", "1f1b")),
], ids=["one stage a rank", "two", "few micro batches", "three", "pieces", "pieces of two", "level3"])  # fmt: skip
def test_auto_takes_only_what_is_legal_with_the_other_settings(more, names) -> None:
    j = job(*FOUR, *more)
    assert legal.candidates(j, ask(j).sizes) == names


def test_auto_takes_the_shortest_step_and_says_what_it_compared() -> None:
    j = job(*FOUR)
    found = choose(j, ask(j).sizes, flat(4))
    assert (found.scheduler, found.sizes.places) == ("zero_bubble_h1", (0, 1, 2, 3))
    (note,) = found.notes
    assert str(note) == f"{PIPE}.scheduler auto -> zero_bubble_h1: bubble 13.0% simulated; gpipe 27.9%, 1f1b 29.0%"


def test_of_equally_short_steps_auto_takes_the_one_that_holds_less() -> None:
    j = job(*FOUR, *LEVEL3)
    assert choose(j, ask(j).sizes, flat(4)).scheduler == "1f1b"


def test_auto_places_the_stages_as_its_choice_wants_them() -> None:
    j = job(*FOUR, f"{PIPE}.interleave=true")
    found = choose(j, ask(j).sizes, flat(8))
    assert (found.scheduler, found.sizes.places) == ("zero_bubble_v", (0, 1, 2, 3, 3, 2, 1, 0))


def test_auto_of_one_stage_is_1f1b() -> None:
    j = job(f"{PIPE}.scheduler=auto")
    assert choose(j, ask(j).sizes, flat(1)).scheduler == "1f1b"
