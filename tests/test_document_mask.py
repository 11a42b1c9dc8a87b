"""Documents that share a window have the loss and every gradient of each document alone, in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.data.open import open_data
from launcher.data.source import Source
from launcher.data.tokens.formats import TokenWriter
from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.models import LanguageModel
from launcher.parallel import grad_norm
from launcher.parallel.deferred_init import fill
from launcher.plan.plan import Plan
from launcher.plan.show.text import text
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.certification.compare import pieces
from launcher.steps.model import build_session, evaluate_in_one_process
from tests.parity import Step, assert_same, build, job, outcome, place, plain
from tests.parity.reference import Outcome
from tests.ranks import DRAWN, on_ranks
from tests.test_parity_tp import MEGATRON, SEQUENCE

BATCH, SEQ, END = 8, 12, 0
LENGTHS = (3, 7, 1, 30, 5, 2, 11, 12, 4, 1, 1, 25) * 3
"""Lengths of documents with their end token: shorter than a window, longer, and equal."""

SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
PP: dict[str, Any] = {"stages": 2, "micro_batch_num": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "1f1b": {"pipeline": PP},
    "interleaved x shard 2, level3": {
        "pipeline": PP | {"interleave": True}, "hsdp": SHARD | {"optimizer_level": "level3"},
    },
    "shard 2, level1": {"hsdp": SHARD | {"optimizer_level": "level1"}},
    "shard 2, level2": {"hsdp": SHARD | {"optimizer_level": "level2"}},
    "zero_bubble_v": {"pipeline": PP | {"scheduler": "zero_bubble_v"}},
    "zero_bubble_h1 x shard 2": {"pipeline": PP | {"scheduler": "zero_bubble_h1"}, "hsdp": SHARD},
    "tp 2": {"operators": MEGATRON, "grid": {"tp": 2}},
    "1f1b x tp 2, sequences cut": {"pipeline": PP, "operators": SEQUENCE, "grid": {"tp": 2}},
    "layers that run again": {"pipeline": PP, "recompute": {"modules": "layers.*"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "a.tokens"
    rng = np.random.default_rng(0)
    with TokenWriter(path, vocab_size=64, end_of_document=END) as file:
        for n in LENGTHS:
            file.append([*rng.integers(1, 64, n - 1), END])
    return path


def job_with_documents(
    corpus: Path, parallel: dict[str, Any], packing: str = "windows", data: dict[str, Any] | None = None, **more: Any
) -> Job:
    tokens = {"name": "tokens", "path": str(corpus), "seq_len": SEQ, "document_mask": True, "packing": packing}
    tokens |= {"val_fraction": 0.2} | (data or {})
    return job(data=tokens, parallel=parallel, train__batch_size=BATCH, **more)


def own(corpus: Path, net: str, parallel: dict[str, Any]) -> Job:
    return job_with_documents(
        corpus, parallel, model={"_target_": f"tests.parallel.document_nets.{net}"}, security__allow=("tests",)
    )


def rank_step(world: World, j: Job, plan: Plan) -> Step:
    par, pipe = build(world, j, plan)
    at, n = place(plan, par.meshes), plan.sizes.local_batch
    mine = np.arange(at * n, (at + 1) * n)
    train = open_data(j.data, seed=0).train
    both = torch.stack([pipe.step(train.inputs(mine), train.targets(mine)), grad_norm.build(par).squared()])
    torch.distributed.all_reduce(both)
    return both[0].item(), both[1].sqrt().item(), pieces(par)


def alone(row: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each document of a window and its last target alone: its tokens, and the next token of each."""
    last = len(row) - 1
    ends = [-1, *(i for i in range(last) if row[i] == END), last]
    for before, end in pairwise(ends):
        if end - before > 1:
            yield torch.tensor([row[before + 1 : end]]), torch.tensor(row[before + 2 : end + 1])


def windows(j: Job) -> list[tuple[Tensor, Tensor]]:
    """Return the documents of the first windows; the file is read without our readers."""
    tokens = np.fromfile(j.data.path, "<u2", offset=64).astype(np.int64).tolist()
    return [d for i in range(BATCH) for d in alone(tokens[i * SEQ : i * SEQ + SEQ + 1])]


def unpacked(j: Job, documents: list[tuple[Tensor, Tensor]]) -> Outcome:
    """Train with plain torch in one process, one document at a time."""
    plan = plan_job(j)
    model = plain(j, plan)
    loss = mean(model, j, documents)
    loss.backward()
    held = fill.tensors(model)
    grads = {p.name: g for p in plan.params if p.trainable and (g := held[p.name].grad) is not None}
    square = torch.stack([g.square().sum() for g in grads.values()]).sum()
    return Outcome(loss.item(), square.sqrt().item(), grads, {})


def mean(model: nn.Module, j: Job, documents: list[tuple[Tensor, Tensor]]) -> Tensor:
    each = [F.cross_entropy(run(model, j, x)[0], y, reduction="sum") for x, y in documents]
    return torch.stack(each).sum() / sum(len(y) for _, y in documents)


def run(model: nn.Module, j: Job, x: Tensor) -> Tensor:
    """Run the model on one document; a user's own model also gets the document numbers."""
    return model(x) if isinstance(j.model, LanguageModel) else model(x, torch.zeros_like(x))


@cache
def of_lm(corpus: Path) -> Outcome:
    j = job_with_documents(corpus, {})
    return unpacked(j, windows(j))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_a_window_are_as_if_each_were_alone(corpus, layout):
    j = job_with_documents(corpus, LAYOUTS[layout])
    plan = plan_job(j)
    got = outcome(plan, on_ranks(plan.sizes.grid.size, rank_step, j, plan))
    assert_same(got, of_lm(corpus), 1e-12)


def test_positions_of_a_model_of_ones_own_restart(corpus):
    j = own(corpus, "Learned", {"pipeline": PP})
    plan = plan_job(j)
    got = outcome(plan, on_ranks(2, rank_step, j, plan))
    single = own(corpus, "Learned", {})
    assert_same(got, unpacked(single, windows(single)), 1e-12)


def test_each_stage_makes_its_own_mask(corpus):
    """The mask is computed from document numbers that are sent, so no (time, time) tensor is sent."""
    plan = plan_job(job_with_documents(corpus, {"pipeline": {"stages": 2}}))
    whole = [[c.name for c in crossing if c.specs[0].dtype == "int64"] for crossing in plan.boundaries]
    assert whole == [["documents"], []]
    assert len(plan.boundaries[0]) == 2


def unpadded(source: Source, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the documents of the first samples; tests/data/tokens proves that they are those of the file."""
    (xs, documents), ys = source.inputs(np.arange(count)), source.targets(np.arange(count))
    out = []
    for x, d, y in zip(xs, documents, ys, strict=True):
        for number in d.unique():
            targets = y[(d == number) & (y != -100)]
            if len(targets):
                out.append((x[d == number][None, : len(targets)], targets))
    return out


PACKED = {
    "best_fit": {"pipeline": PP, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "single": {"pipeline": PP | {"scheduler": "zero_bubble_v"}},
}


@pytest.mark.parametrize("packing", PACKED)
def test_padding_counts_for_nothing(corpus, packing):
    j = job_with_documents(corpus, PACKED[packing], packing)
    plan = plan_job(j)
    got = outcome(plan, on_ranks(plan.sizes.grid.size, rank_step, j, plan))
    j = job_with_documents(corpus, {}, packing)
    assert_same(got, unpacked(j, unpadded(open_data(j.data, seed=0).train, BATCH)), 1e-12)


def rank_validate(world: World, j: Job, plan: Plan, folder: Path) -> dict[str, float]:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    loop.validate(s, None)
    return s.results


@pytest.mark.parametrize("packing", ["windows", *PACKED])
def test_evaluation_and_metrics_count_real_tokens(corpus, packing, tmp_path):
    """The held-out samples do not fill a batch; loss and metrics must be those of the documents alone."""
    metrics = ({"name": "perplexity"}, {"name": "accuracy"})
    j = job_with_documents(corpus, {"pipeline": PP, "grid": {"dp_replicate": 2}}, packing, metrics=metrics)
    plan = plan_job(j)
    val, model = open_data(j.data, seed=0).val, plain(j, plan)
    documents = unpadded(val, len(val))
    with torch.no_grad():
        loss = mean(model, j, documents).item()
        right = [run(model, j, x)[0].argmax(-1) == y for x, y in documents]
    want = {"val_loss": loss, "val_perplexity": math.exp(loss), "val_accuracy": torch.cat(right).double().mean().item()}
    for got in on_ranks(4, rank_validate, j, plan, tmp_path):
        assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-12)
    assert evaluate_in_one_process.held_out(model, j, None)["loss"] == pytest.approx(loss, rel=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sequences in pieces": (
        {"parallel": {"pipeline": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2}}},
        "parallel.pipeline.seq_chunks: 2: data.document_mask=true restarts positions and ends attention "
        "inside a piece of a sequence, which sequence chunks do not support; use full sequences "
        "(try: parallel.pipeline.seq_chunks=1 parallel.pipeline.scheduler=1f1b)",
    ),
    "targets that count for nothing are others": (
        {"loss": {"name": "cross_entropy", "ignore_index": 3}},
        "loss.ignore_index: 3: with data.document_mask=true there are targets of -100, which must be ignored "
        "(try: loss.ignore_index=-100)",
    ),
    "padding that would count": (
        {"data": {"document_mask": False, "packing": "single"}, "loss": {"name": "cross_entropy", "ignore_index": 3}},
        "loss.ignore_index: 3: with data.packing=single there are targets of -100, which must be ignored "
        "(try: loss.ignore_index=-100)",
    ),
    "a model that takes tokens alone": (
        {"model": {"name": "tied_pair", "vocab_size": None}},
        "data.document_mask: true: model tied_pair takes only tokens and cannot separate documents "
        "(try: data.document_mask=false)",
    ),
    "a second input that is something else": (
        {"model": {"_target_": "tests.parallel.document_nets.Padded"}, "security__allow": ("tests",)},
        "data.document_mask: true: the forward of tests.parallel.document_nets.Padded takes (tokens, mask), but it "
        "must also take documents; define forward(self, tokens, documents), with attention only within documents "
        "(try: data.document_mask=false)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_cannot_keep_documents_apart_are_refused(corpus, case):
    changes, said = REFUSED[case]
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_documents(corpus, **{"parallel": {}} | changes))
    assert str(refused.value) == said


def test_the_plan_says_what_is_meant(corpus):
    said = " ".join(text(plan_job(job_with_documents(corpus, {}))).split())
    assert (
        "settings data.document_mask=true: applied, attention stays within documents and positions restart; the last "
        "token of a document has no target" in said
    )
