"""transformers' models start as if constructed plainly: initializations are not skipped, and buffers exist."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.__main__ import main
from launcher.parallel.deferred_init import constructor
from launcher.parallel.deferred_init.replay import replay
from launcher.parallel.deferred_init.uninitialized import problems

if find_spec("transformers") is None:
    pytest.skip("not installed: transformers; make test-real installs it", allow_module_level=True)

from tests.real import constructed

NAMES = [*constructed.CAUSAL, *constructed.OTHERS]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}


def names(model: nn.Module) -> list[list[str]]:
    """The names of each tensor."""
    found: dict[int, list[str]] = {}
    for name, t in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(t), []).append(name)
    return sorted(found.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_construction_that_is_seeded_is_replayed_to_the_bit(name: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return constructed.build(name)

    model, recorded = constructor.record(build, 5)
    assert recorded.why == ""
    want, meta = build(), tensors(model)
    assert names(model) == names(want)
    assert set(tensors(want)) <= set(meta)
    for n, t in tensors(want).items():
        made = replay(recorded.log, meta[n], n, 5)
        assert made.dtype == t.dtype
        assert torch.equal(made, t) or (made.isnan() & t.isnan() | (made == t)).all(), n


@pytest.mark.parametrize("name", NAMES)
def test_a_construction_that_is_not_is_distributed_alike(name: str) -> None:
    model, recorded = constructor.record(lambda: constructed.build(name), 5)
    assert recorded.why == ""
    assert not problems(lambda: constructed.build(name), model, recorded)
    torch.manual_seed(5)
    want, meta = tensors(constructed.build(name)), tensors(model)
    for n, t in want.items():
        made = replay(recorded.log, meta[n], n, 5)
        assert made.isfinite().equal(t.isfinite()), n
        constant = t.numel() > 1 and (t == t.reshape(-1)[0]).all()
        if constant or not t.is_floating_point():
            assert torch.equal(made, t), n
        elif t.numel() >= 256:
            size = t.std().item()
            assert abs(made.std().item() - size) <= 0.2 * size, n
            assert abs((made.mean() - t.mean()).item()) <= 0.25 * size, n
            assert made.abs().max() <= 2 * t.abs().max(), n


@pytest.mark.parametrize("layout", ["shard", "stages"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "MambaForCausalLM"])
def test_the_loss_of_the_first_step_is_near_the_logarithm_of_the_vocabulary(
    name: str, layout: str, tmp_path: Path
) -> None:
    shape = {
        "shard": "parallel.hsdp={shard_size: 2, threshold: 0}",
        "stages": "parallel.pipeline={stages: 2, micro_batch_num: 2}",
    }[layout]
    words = [
        "recipe=lm_single", "model=null", "model._target_=tests.real.constructed.Lm", f"model.name={name}",
        "security.allow=[tests]", "data=random_tokens", "data.vocab_size=64", "data.seq_len=16",
        "train.batch_size=16", "train.steps=2", "steps=[train]", "launch.nproc=2", shape, f"run_dir={tmp_path / 'run'}",
        "logger=plain",
    ]  # fmt: skip
    assert main(words) == 0
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(row["loss"] for row in rows if "loss" in row)
    assert abs(first - math.log(64)) <= 0.1 * math.log(64)
