"""Conversations train the weights of plain torch, which reads each alone and without padding, in every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from launcher.data.open import open_data
from launcher.job.schema.job import Job
from launcher.parallel.deferred_init import fill
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.training import loop
from launcher.steps.certification.compare import Piece, error, pieces
from launcher.steps.model import build_session
from tests.parity import job, plain, whole
from tests.ranks import DRAWN, on_ranks

STEPS = 3
CHATS = [  # from 10 to 70 tokens of each are learned, so micro batches and ranks differ
    [("user", "a"), ("assistant", "b")],
    [("user", "long question?" * 3), ("assistant", "")],
    [("system", "short"), ("user", "1 + 1"), ("assistant", "2"), ("user", "and 1"), ("assistant", "3, é")],
    [("user", "say it"), ("assistant", "it " * 20)],
    [("user", "x"), ("assistant", "  y\n\nz ")],
    [("user", "?"), ("assistant", "!"), ("user", "?"), ("assistant", "!!"), ("user", "end")],
    [("user", "count"), ("assistant", "1 2 3 4 5 6 7 8 9")],
    [("user", "ä"), ("assistant", "ö" * 9)],
]
LAYOUTS: dict[str, dict[str, Any]] = {
    f"pp2 x {level}": {
        "pipeline": {"stages": 2, "micro_batch_num": 2},
        "hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level},
    }
    for level in ("level1", "level2", "level3")
}
Found = tuple[list[float], list[Piece]]


def rank_trains(world: World, cells: Mapping[str, tuple[Job, Plan]], folder: Path) -> dict[str, Found]:
    out = {}
    for name, (j, plan) in cells.items():
        s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
        losses = []
        for step in range(STEPS):
            losses.append(loop.step(s, 1.0)[0])
            s.step = step + 1
        out[name] = losses, pieces(s.model, weights=True)
    return out


def bytes_learned(chat: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """The bytes of a conversation, and which of them the assistant says."""
    ids, learned = [], []
    for role, content in chat:
        for text, mine in (
            (f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>", role == "assistant"), ("\n", False)
        ):  # fmt: skip
            ids += list(text.encode())
            learned += [mine] * len(text.encode())
    return ids, learned


def alone(model: nn.Module) -> list[float]:
    """Losses of training on all of ``CHATS`` at once: the sum divided by the number of learned tokens."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for chat in CHATS:
            ids, learned = bytes_learned(chat)
            mine = torch.tensor(learned[1:])
            logits = model(torch.tensor([ids[:-1]]))[0][mine]
            total = total + F.cross_entropy(logits, torch.tensor(ids[1:])[mine], reduction="sum")
            count += int(mine.sum())
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item() / count)
    return losses


def test_losses_and_weights_are_those_of_plain_torch(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in CHATS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"name": "lm", "vocab_size": 257, "dim": 16, "layers": 2, "heads": 2}
    cells = {}
    for name, parallel in LAYOUTS.items():
        for packing, samples in (("single", len(CHATS)), ("best_fit", 4)):  # of 256 tokens: two conversations each
            j = job(
                parallel=parallel, model=model, optim={"name": "sgd", "lr": 0.5}, train__steps=STEPS,
                data={"name": "chat", "path": str(path), "val_fraction": 0.0, "packing": packing},
                train__batch_size=samples,
            )  # fmt: skip
            assert len(open_data(j.data, seed=0).train) == samples
            cells[f"{name} {packing}"] = j, plan_job(j)
    ranks = on_ranks(4, rank_trains, cells, tmp_path)
    for name, (j, plan) in cells.items():
        expected = plain(j, plan)
        losses = alone(expected)
        for rank in ranks:
            assert rank[name][0] == pytest.approx(losses, rel=1e-12), name
        trained = whole(plan, [p for rank in ranks for p in rank[name][1]])
        off = {n: error(t, fill.tensors(expected)[n].detach()) for n, t in trained.items()}
        assert {n: e for n, e in off.items() if not e <= 1e-12} == {}, name
        assert len(off) > 10
