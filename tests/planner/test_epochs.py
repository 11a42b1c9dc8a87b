"""``train.epochs``: the steps that follow from samples, batch size and epochs."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import Tensor

from launcher.__main__ import main
from launcher.data.shuffle import Indices, batch_indices
from launcher.data.source import Source
from launcher.errors import RequestError
from launcher.plan.show.text import text
from launcher.planner.plan_job import plan_job
from tests.plan.made import job
from tests.run.launching import TINY, metrics, run, shape, tensors

EPOCHS = (
    "train.steps=null", "train.batch_size=16", "data=random_tokens", "data.vocab_size=256", "data.seq_len=8",
    "steps=[train]",
)  # fmt: skip
OWN = ("model.vocab_size=256", "steps=[train]", "security.allow=[tests]", "train.steps=null", "train.epochs=2")


class Uncounted(Source):
    """A source with an unknown or infinite number of samples."""

    def __init__(self, split: str, samples: int = 0) -> None:
        self.samples = samples

    def __len__(self) -> int:
        if not self.samples:
            raise TypeError("a stream has no length")
        return self.samples

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (torch.zeros(len(indices), 8, dtype=torch.int64),)

    def targets(self, indices: Indices) -> Tensor:
        return torch.zeros(len(indices), 8, dtype=torch.int64)


@pytest.mark.parametrize(("samples", "epochs", "steps"), [(64, 2, 8), (40, 1, 3), (40, 3, 8), (5, 1, 1)])
def test_so_many_steps_train_on_every_sample_so_often_and_no_fewer_do(samples, epochs, steps):
    made = plan_job(job(*EPOCHS, f"data.samples={samples}", f"train.epochs={epochs}"))
    assert (made.sizes.steps, made.sizes.epochs) == (steps, epochs)

    def least(n: int) -> int:
        seen = Counter(i for step in range(n) for i in batch_indices(0, step, 16, samples).tolist())
        return min(seen[i] for i in range(samples))

    assert least(steps) >= epochs > least(steps - 1)


def test_the_plan_says_it_and_what_the_last_batch_is_filled_with():
    said = text(plan_job(job(*EPOCHS, "data.samples=40", "train.epochs=3")))
    assert "16 samples = 1 data-parallel rank x 1 micro batch x 16 samples; 3 epochs = 8 steps\n" in said
    rest = "the last step takes the last 8 of them and 8 samples of the next epoch"
    assert f"train.steps null -> 8: 3 epochs of 40 samples; {rest}" in " ".join(said.split())
    small = text(plan_job(job(*EPOCHS, "data.samples=5", "train.epochs=1")))
    assert "the last step takes the last 5 of them and 11 samples of the next epochs" in " ".join(small.split())
    even = text(plan_job(job(*EPOCHS, "data.samples=64", "train.epochs=1")))
    assert "1 epoch = 4 steps\n" in even
    assert "train.steps null -> 4: 1 epoch of 64 samples\n" in even


def test_a_part_of_the_samples_or_of_the_steps_counts():
    few = plan_job(job(*EPOCHS, "data.samples=64", "train.epochs=4", "debug.overfit=16"))
    assert (few.sizes.steps, few.sizes.epochs) == (4, 4)
    cut = plan_job(job(*EPOCHS, "data.samples=64", "train.epochs=4", "debug.limit=3"))
    assert (cut.sizes.steps, cut.sizes.epochs) == (3, None)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (
            0,
            "the samples of tests.planner.test_epochs.Uncounted cannot be counted: TypeError: a stream has no length "
            '(test_epochs.py:36, in __len__: raise TypeError("a stream has no length"))',
        ),
        (
            sys.maxsize,
            f"tests.planner.test_epochs.Uncounted has {sys.maxsize} samples, more than any training can read",
        ),
    ],
)
def test_data_without_an_end_is_refused(samples, why):
    own = f"data={{_target_: tests.planner.test_epochs.Uncounted, samples: {samples}}}"
    with pytest.raises(RequestError) as caught:
        plan_job(job(own, *OWN))
    assert str(caught.value) == f"train.epochs: 2: {why}; set train.steps instead"


def test_exactly_one_of_both_says_how_long_to_train(capsys):
    words = [*TINY, *shape(), "show=plan"]
    assert main([*words, "train.epochs=3"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  train.epochs = 3: train.steps=200 already says how long to train; use train.steps=null\n"
        "    set by: train.epochs=3 (command line)\n"
        "    try:    train.epochs=3 train.steps=null\n"
    )
    assert main([*words, "train.epochs=3", "train.steps=null"]) == 0
    capsys.readouterr()
    assert main([*words, "train.steps=null"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  train.steps = null: train.steps or train.epochs must say how long to train; set one of them\n"
        "    set by: train.steps=null (command line)\n"
    )


def test_a_decay_is_held_against_the_steps_that_follow():
    wsd = "schedule={name: wsd, decay_steps: 6, warmup_steps: 0}"
    assert plan_job(job(*EPOCHS, wsd, "data.samples=64", "train.epochs=2")).sizes.steps == 8
    with pytest.raises(RequestError) as caught:
        plan_job(job(*EPOCHS, wsd, "data.samples=64", "train.epochs=1"))
    assert str(caught.value) == (
        "schedule.decay_steps: 6: schedule.warmup_steps=0 leaves 4 of train.steps=4 (try: schedule.decay_steps=4)"
    )


def test_a_run_of_epochs_is_that_of_as_many_steps_and_goes_on_with_more(tmp_path):
    for name, *length in (("steps", "train.steps=8"), ("epochs", "train.steps=null", "train.epochs=2")):
        run(tmp_path / name, *length, "checkpoint.every=3", "checkpoint.keep=null", "schedule.warmup_steps=2")
    assert [row["steps"] for row in metrics(tmp_path / "epochs")] == [8] * 8
    assert tensors(tmp_path / "steps", 8) == tensors(tmp_path / "epochs", 8)

    more = run(tmp_path / "epochs", "train.steps=null", "train.epochs=3", "schedule.warmup_steps=2")
    assert [row["step"] for row in metrics(more)] == list(range(1, 13))
    fewer = [*TINY, f"run_dir={more}", "train.steps=null", "train.epochs=1", "schedule.warmup_steps=2"]
    assert main(fewer) == 2
    assert main([*fewer, "train.steps=12", "train.epochs=null"]) == 0
