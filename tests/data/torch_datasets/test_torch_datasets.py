"""A torch ``Dataset`` or ``IterableDataset`` trains as in plain torch, or is refused with the reason."""

from __future__ import annotations

import json
import random
import re
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from launcher.checkpoint.read import open_checkpoint
from launcher.data.open import open_data
from launcher.data.torch_datasets.open import open_own
from launcher.errors import RequestError
from launcher.job.schema.user_class import Target
from launcher.planner.plan_job import plan_job
from launcher.runtime.faults import RanksFailed
from tests.data.torch_datasets import sets
from tests.data.torch_datasets.sets import CLASSES, SIDE, numbers
from tests.data.torch_datasets.training import (
    BATCH,
    LAYOUTS,
    MODEL,
    SHARD,
    STEPS,
    Batch,
    alone,
    assert_same,
    of,
    on_layout,
    order,
    trained,
)
from tests.steps.certified import certificate

N = 11


def seeded(*key: int) -> None:
    """Seed the generators as docs/your_own.md describes."""
    a, b = np.random.SeedSequence(key[0], spawn_key=key[1:]).generate_state(2, np.uint32).tolist()
    random.seed(a << 32 | b)
    np.random.seed(a)
    torch.manual_seed(a << 31 | b >> 1)


def noise() -> torch.Tensor:
    return torch.randn(SIDE, dtype=torch.float64) + random.random() + np.random.random()


def stacked(rows: list[tuple[torch.Tensor, int]]) -> Batch:
    return (torch.stack([x for x, _ in rows]),), torch.tensor([y for _, y in rows])


def test_items_by_index_with_noise_equal_plain_torch_on_any_layout_and_after_a_resume(tmp_path):
    places = order(N)

    def batch(step: int) -> Batch:
        rows = []
        for epoch, i in places[step]:
            seeded(0, 0, epoch, i)
            rows.append((numbers(i) + noise(), i % CLASSES))
        return stacked(rows)

    held = []
    for i in range(7):
        seeded(0, 1, 0, i)
        held.append((numbers(100 + i) + noise(), i % CLASSES))
    jobs = {name: trained(of("Rows", samples=N, noise=True), name) for name in LAYOUTS}
    want = alone(jobs["one rank"], batch, stacked(held))
    for name, j in jobs.items():
        assert_same(on_layout(j, tmp_path / name), want)

    # the epoch ends within step 3: stop after it, and resume in another layout
    saved, *_ = on_layout(jobs["hsdp2"], tmp_path / "stopped", until=3)
    assert_same(on_layout(jobs["pp2"], tmp_path / "on", saved=saved), want)


def test_items_know_their_epoch_on_any_layout_and_after_a_resume(tmp_path):
    places = order(N)

    def batch(step: int) -> Batch:
        return stacked([(numbers(i) * (1 + epoch), i % CLASSES) for epoch, i in places[step]])

    jobs = {name: trained(of("InEpochs", samples=N), name) for name in LAYOUTS}
    want = alone(jobs["one rank"], batch, stacked([(numbers(100 + i), i % CLASSES) for i in range(7)]))
    for name, j in jobs.items():
        assert_same(on_layout(j, tmp_path / name), want)
    saved, *_ = on_layout(jobs["hsdp2"], tmp_path / "stopped", until=3)
    assert_same(on_layout(jobs["pp2"], tmp_path / "on", saved=saved), want)


def test_a_class_that_also_reads_in_batches_is_planned():
    plan_job(trained(of("InBatches", samples=N, same=True)))


def test_a_stream_is_read_in_its_order_on_any_layout_and_after_a_resume(tmp_path):
    seeded(0, 0)
    offset = random.random()

    def batch(step: int) -> Batch:
        rows = []
        for i in range(step * BATCH, (step + 1) * BATCH):
            seeded(0, 0, 1, i)
            rows.append((numbers(i) + noise() + offset, i % CLASSES))
        return stacked(rows)

    jobs = {name: trained(of("Row", noise=True), name) for name in LAYOUTS}
    want = alone(jobs["one rank"], batch)
    for name, j in jobs.items():
        assert_same(on_layout(j, tmp_path / name), want)
    saved, *_ = on_layout(jobs["pp2"], tmp_path / "stopped", until=3)
    assert_same(on_layout(jobs["hsdp2"], tmp_path / "on", saved=saved), want)


def test_a_stream_knows_that_it_is_in_epoch_0_before_it_begins():
    job = trained(of("InEpoch"))
    plan_job(job)
    stream = open_data(job.data, seed=0, allow=("tests",)).train
    places = np.array([0, 9, 3])  # the last one begins anew
    assert torch.equal(stream.inputs(places)[0], torch.stack([numbers(i) for i in places.tolist()]))


def test_a_stream_that_says_where_it_is_goes_on_there_on_any_layout(tmp_path):
    carry = [*accumulate(range(STEPS * BATCH))]

    def batch(step: int) -> Batch:
        rows = []
        for i in range(step * BATCH, (step + 1) * BATCH):
            seeded(0, 0, 1, i)
            rows.append((numbers(i) + carry[i] + torch.randn(6, dtype=torch.float64), i % CLASSES))
        return stacked(rows)

    jobs = {name: trained(of("Kept"), name) for name in LAYOUTS}
    want = alone(jobs["one rank"], batch)
    saved, *_ = on_layout(jobs["hsdp2"], tmp_path / "stopped", until=3)
    said = open_checkpoint(saved).state["stream"]
    first = 3 * BATCH - BATCH // 2  # rank 0 has read its half of the third batch
    assert (said["items"], said["state"]) == (first, {"at": first, "carry": carry[first - 1]})
    for name, j in jobs.items():
        assert_same(on_layout(j, tmp_path / name, saved=saved), want)


@pytest.mark.parametrize(("name", "how", "reads"), [
    ("Kept", "", 3), ("KeptByIterator", None, 3), ("Kept", "no JSON", 13), ("Kept", "long", 13), ("Row", None, 0),
], ids=str)  # fmt: skip
def test_a_stream_that_restores_its_position_reads_only_the_remaining_items(name, how, reads):
    """It reads up to item 12, and 10 items were read before."""
    settings = Target.model_validate(of(name, **({} if how is None else {"how": how})))
    one, other = (open_own(settings, 0, ("tests",)).train for _ in range(2))
    want = one.inputs(np.arange(13))[0]
    first = open_own(settings, 0, ("tests",)).train
    first.inputs(np.arange(10))
    place = first.place()
    assert (place is None) == (reads != 3)
    if place is not None:
        other.go_on(json.loads(json.dumps(place)))
    sets.Kept.read = 0
    for i in (10, 11, 12, 12):  # padding requests the last one again
        assert torch.equal(other.inputs(np.array([i]))[0], want[i : i + 1])
    assert sets.Kept.read == reads
    assert torch.equal(other.inputs(np.array([2]))[0], want[2:3])  # an earlier item


def test_a_stream_of_another_request_is_read_from_its_beginning():
    one, other = (open_own(Target.model_validate(of("Kept")), seed, ("tests",)).train for seed in (0, 1))
    one.inputs(np.arange(4))
    sets.Kept.read = 0
    other.go_on(one.place())
    other.inputs(np.array([4]))
    assert sets.Kept.read == 5


@pytest.mark.parametrize(
    ("data", "model", "held", "two"),
    [
        (of("NoSplit", samples=N), {}, "fraction", False),
        (of("NoSplit", samples=N, val_fraction=0.25), {}, "fraction", False),
        (of("rows", samples=N), {}, "fraction", False),
        (of("Trained", samples=N), {}, "other", False),
        (of("NoSplit", samples=N, val=of("Rows", samples=99, split="val")), {}, "other", False),
        (of("Rows", samples=N, split="train", val={"split": "val"}), {}, "other", False),
        (of("Rows", samples=N, how="dict"), {}, "other", False),
        (of("Rows", samples=N, how="two inputs"), {"ways": 2}, "other", True),
    ],
    ids=["fraction", "fraction said", "function", "train", "val another class", "val arguments", "dict", "two inputs"],
)
def test_shapes_of_items_and_ways_to_hold_out(data, model, held, two, tmp_path):
    allow = ("tests", "tests.data.torch_datasets.sets")
    j = trained(data, model={"_target_": "tests.data.torch_datasets.sets.Net", **model}, security__allow=allow)
    mine, out = list(range(N)), [100 + i for i in range(7)]
    if held == "fraction":
        keys = np.random.Philox(np.random.SeedSequence(0, spawn_key=(0,))).random_raw(N)
        shuffled = np.argsort(keys, kind="stable").tolist()
        cut = N - round(N * data.get("val_fraction", 0.1))
        mine, out = sorted(shuffled[:cut]), sorted(shuffled[cut:])
        assert len(out) == (3 if "val_fraction" in data else 1)

    def rows(numbered: list[int]) -> Batch:
        labels = torch.tensor([(i if i < 100 else i - 100) % CLASSES for i in numbered])
        x = torch.stack([numbers(i) for i in numbered])
        return ((x, -2 * x) if two else (x,)), labels

    places = order(len(mine))
    want = alone(j, lambda step: rows([mine[i] for _, i in places[step]]), rows(out))
    assert_same(on_layout(j, tmp_path), want)


@pytest.mark.parametrize("data", [of("Rows", samples=N, noise=True), of("Row", noise=True)], ids=["items", "stream"])
def test_certify_asks_for_the_same_by_its_own_order(data):
    layout = {"pipeline": {"stages": 2, "micro_batch_num": 2}, "hsdp": SHARD}
    found = certificate(layout, data=data, model=MODEL, security__allow=("tests",))
    assert found.holds
    assert {"samples", "gradient"} <= {f.part for f in found.findings}


NAME = "tests.data.torch_datasets.sets"
KNOWN = "one of input, inputs, x, image, pixel_values and one of target, targets, y, label, labels, and no others"
DRAW = "draw from the global random streams of torch, numpy or Python, which are seeded by (seed, epoch, item)"
EVALUATES: dict[str, Any] = {"steps": {"train": {"kind": "train"}, "evaluate": {"kind": "evaluate"}}}
REFUSED = {
    "own generator": (
        trained(of("Rows", samples=N, how="own generator")),
        (
            f"data._target_: {NAME}.Rows: item 0 differs when it is read again, so no two "
            f"layouts would train the same; {DRAW}"
        ),
    ),
    "made otherwise": (
        trained(of("Rows", samples=N, how="made otherwise")),
        f"data._target_: {NAME}.Rows: built a second time, its item 0 differs, and each rank builds its own copy; "
        f"{DRAW}; in its constructor, they are seeded by the seed",
    ),
    "seldom own generator": (
        trained(of("Rows", samples=N, how="seldom own generator")),
        f"data._target_: {NAME}.Rows: item 4 differs when it is read again, so no two layouts would train the same; "
        f"{DRAW}",
    ),
    "counts its reads": (
        trained(of("LateReads", samples=N)),
        f"data._target_: {NAME}.LateReads: it counts what it reads (reads), and item 0 changes after more of them; "
        "each layout and a resumed run read another number of items; use the index, or the epoch, which the launcher "
        "passes to set_epoch(epoch)",
    ),
    "one buffer": (
        trained(of("OneBuffer", samples=N)),
        f"data._target_: {NAME}.OneBuffer: item 0 differs when others are read after it, so no two layouts would train "
        "the same; return a new tensor or array for each item",
    ),
    "other items in batches": (
        trained(of("InBatches", samples=N, same=False)),
        f"data._target_: {NAME}.InBatches: its __getitems__, which a DataLoader calls, returns other items than its "
        "__getitem__, which the launcher calls; let both return the same",
    ),
    "stream made otherwise": (
        trained(of("Row", how="made otherwise")),
        f"data._target_: {NAME}.Row: built a second time, its item 0 differs, and each rank builds its own copy; "
        f"{DRAW}; in its constructor, they are seeded by the seed",
    ),
    "lost state": (
        trained(of("Kept", how="lost")),
        (
            f"data._target_: {NAME}.Kept: restored from its state_dict after 2 items, it "
            "continues with a different item 2; save everything in it that the next items "
            "depend on, or remove it: a resumed run then reads the stream from its start"
        ),
    ),
    "late by the clock": (
        trained(of("LateByTime")),
        f"data._target_: {NAME}.LateByTime: built a second time, its item 20 differs, and each rank builds its own "
        f"copy; {DRAW}; in its constructor, they are seeded by the seed",
    ),
    "late state": (
        trained(of("LateState")),
        f"data._target_: {NAME}.LateState: restored from its state_dict after 16 items, it continues with a different "
        "item 16; save everything in it that the next items depend on, or remove it: a resumed run then reads the "
        "stream from its start",
    ),
    "alone": (
        trained(of("Rows", samples=N, how="alone")),
        f"data._target_: {NAME}.Rows: item 0 has type Tensor; return a tuple (input, target), or (inputs..., target)",
    ),
    "text": (
        trained(of("Rows", samples=N, how="text")),
        f"data._target_: {NAME}.Rows: input 0 of item 0 has type str, which cannot become a tensor; return a "
        "tensor, an array or a number",
    ),
    "tokens of transformers": (
        trained(of("Rows", samples=N, how="tokens")),
        f"data._target_: {NAME}.Rows: item 0 has the keys input_ids, labels; supported: {KNOWN} (labels of "
        "transformers are the input tokens; here, targets are one token later); return a tuple (inputs..., "
        "target), in the order of the model's forward",
    ),
    "a loader": (
        trained(of("Loader")),
        f"data._target_: {NAME}.Loader: is a Loader, but launcher makes batches, their order and workers "
        "itself; name the data set",
    ),
    "a model": (
        trained(of("Net")),
        f"data._target_: {NAME}.Net: is not a Source, nor a Dataset or IterableDataset of torch",
    ),
    "no length": (
        trained(of("Endless")),
        f"data._target_: {NAME}.Endless: this Dataset has no __len__; its len() must be the number of items",
    ),
    "all held out": (
        trained(of("NoSplit", samples=N, val_fraction=1)),
        "data.val_fraction: 1: must be a share of the samples, at least 0 and below 1 (try: data.val_fraction=0.1)",
    ),
    "held out twice": (
        trained(of("NoSplit", samples=N, val_fraction=0.5, val={"samples": 3})),
        "data.val_fraction: 0.5: data.val already names the validation data; give only one of them "
        "(try: ~data.val_fraction)",
    ),
    "val is a word": (
        trained(of("NoSplit", samples=N, val="test")),
        "data.val: test: must be the arguments that differ for validation, as {split: test}",
    ),
    "a share of a stream": (
        trained(of("Row", val_fraction=0.5)),
        f"data.val_fraction: 0.5: {NAME}.Row is an IterableDataset, which has no indices; name validation data "
        "as data.val (try: ~data.val_fraction)",
    ),
    "held out of an endless stream": (
        trained(of("Row", val={"samples": 4})),
        f"data.val: {NAME}.Row: an IterableDataset without __len__, but validation samples are counted; give it "
        "a __len__, or name a Dataset",
    ),
    "too short": (
        trained(of("Counted", samples=3 * BATCH + 1)),
        f"train.steps: {STEPS}: steps of {BATCH} samples need 20, but {NAME}.Counted has 13 (try: train.steps=3)",
    ),
    "nothing to evaluate": (
        trained(of("Row"), **EVALUATES),
        f"steps.evaluate: {NAME}.Row has no held-out samples; name them in data.val, or evaluate nothing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_sets_that_cannot_train_correctly_are_refused_by_the_plan(case):
    j, text = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        plan_job(j)
    assert str(caught.value) == text


@pytest.mark.parametrize(("how", "precision", "noted"), [
    ("ids in a column", "bf16", True), ("ids in a column", "fp16", False), ("ids in a column", "fp32", False),
    ("pair", "bf16", False),
])  # fmt: skip
def test_whole_numbers_that_a_precision_rounds_are_noted(how, precision, noted):
    train = {"steps": STEPS, "batch_size": BATCH, "precision": precision}
    notes = [str(n) for n in plan_job(trained(of("Rows", samples=N, how=how), train=train)).notes]
    text = r"input 0 has columns of whole numbers, and bf16 rounds them, such as (10\d\d) to (10\d\d)"
    line = re.compile(f"data._target_ {text}: if they are ids, pass them as an input of an integer dtype")
    lines = [line.fullmatch(n) for n in notes if "whole numbers" in n]
    assert len(lines) == noted
    assert all(m is not None and float(torch.tensor(float(m[1])).bfloat16()) == float(m[2]) for m in lines)


def test_the_plan_notes_how_a_users_data_set_is_read():
    notes = [str(n) for n in plan_job(trained(of("NoSplit", samples=N))).notes]
    assert "data.val_fraction null -> 0.1: 1 of 11 samples are held out, drawn once" in notes
    notes = [str(n) for n in plan_job(trained(of("Row"))).notes]
    assert (
        f"data._target_ {NAME}.Row is a stream: each data-parallel rank reads all of it and keeps its own rows; a "
        "resumed run reads it again up to its place"
    ) in notes
    for name in ("Kept", "KeptByIterator"):
        notes = [str(n) for n in plan_job(trained(of(name))).notes]
        assert any(n.endswith("its own rows; a resumed run loads its state_dict") for n in notes)


LATER = {
    "raises": (of("Rows", samples=N, how="raises at 5"), "Rows: item 5 cannot be read: OSError: no such picture"),
    "longer": (
        of("Rows", samples=N, how="longer at 5"),
        "Rows: input 0 of item 5 has shape (12,), of item 1 (6,); all samples must have one shape: cut them or "
        "pad them",
    ),
    "the end": (
        of("Row", samples=3 * BATCH + 1),
        (
            "Row: the stream ended after 13 items, but item 13 (from 0) is needed; let it "
            "start over by itself, or set train.steps to at most 13 // train.batch_size"
        ),
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_an_item_that_turns_out_bad_ends_the_run_with_its_number(case, tmp_path):
    data, text = LATER[case]
    with pytest.raises(RanksFailed) as failed:
        on_layout(trained(data, "pp2"), tmp_path)
    assert failed.value.fault.message.startswith(f"data._target_ = {NAME}.{text}")


def test_a_stream_that_splits_itself_by_rank_is_refused_on_several():
    with pytest.raises(RequestError) as refused:
        plan_job(trained(of("ByRank"), "hsdp2"))
    assert str(refused.value) == (
        f"data._target_: {NAME}.ByRank: it asks for torch.distributed.is_initialized(), but 2 ranks get another answer "
        "than one process, so another layout gives other numbers; remove it: the launcher combines samples, gradients, "
        "losses and metrics itself"
    )
    plan_job(trained(of("ByRank")))


def test_a_stream_that_differs_between_processes_ends_the_run(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        on_layout(trained(of("ByProcess"), "hsdp2"), tmp_path)
    assert failed.value.fault.message == (
        "rank 1 has other data than rank 0: its first sample differs; every rank must open all "
        "samples: the launcher divides them; do not split the data by rank"
    )


def test_random_numbers_of_the_run_are_left_alone():
    data = open_data(trained(of("Rows", samples=N, noise=True)).data, seed=0, allow=("tests",))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    rows = np.array([3, 1])
    both = data.train.inputs(rows)[0], data.train.targets(rows)
    assert [b.shape[0] for b in both] == [2, 2]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
