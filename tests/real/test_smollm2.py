"""SmolLM2-135M through both recipes, checked by transformers: read, trained on 4 ranks, exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.__main__ import main
from launcher.checkpoint.foreign.hugging_face import write_hf
from launcher.checkpoint.foreign.names import TO_LLAMA
from launcher.data import smollm2
from launcher.data.open import open_data
from launcher.job.compose import compose
from launcher.objective.losses import cross_entropy
from launcher.planner.plan_job import plan_job
from launcher.runtime.training import checkpoint_tensors
from launcher.steps.model import build_session
from tests.ranks import on_ranks

MISSING = [name for name in smollm2.PACKAGES if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; make test-real installs them"),
    pytest.mark.timeout(1200),  # the first test also makes the weights and runs the recipe
]

STEPS = 3
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is removed afterwards, because it has gigabytes."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def weights(home: Path) -> Path:
    smollm2.write(home / "weights")
    return home / "weights"


@pytest.fixture(scope="module")
def words(weights: Path) -> list[str]:
    return ["recipe=smollm2_pp2_tp2", f"steps.import.src={weights}", f"train.steps={STEPS}", "logger=plain"]


@pytest.fixture(scope="module")
def run(home: Path, words: list[str]) -> Path:
    """The full recipe with fewer steps."""
    assert main([*words, f"run_dir={home}/run"]) == 0
    return home / "run"


@pytest.fixture(scope="module")
def held_out(words: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of real text on which no step trains, and the next tokens."""
    job = compose(words).job
    val = open_data(job.data, seed=0, allow=()).val
    first = torch.arange(job.train.batch_size).numpy()
    return val.inputs(first)[0], val.targets(first)


def on_four_ranks(words: list[str], checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the pipeline with the weights of ``checkpoint``."""
    job = compose(words).job
    plan, out = plan_job(job), checkpoint.parent / "logits.pt"

    def predict(world: Any) -> None:
        live = build_session.build(world, job, plan, checkpoint.parent)
        checkpoint_tensors.load(live, checkpoint)
        got = live.pipeline.predict([tokens])
        if world.rank == world.size - 1:
            assert got is not None
            torch.save(got, out)

    on_ranks(plan.sizes.grid.size, predict, timeout_s=300)
    return torch.load(out)


def of_transformers(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = of_transformers(folder)(tokens).logits
    return found


def test_four_ranks_make_the_logits_of_transformers(run, words, weights, held_out):
    got = on_four_ranks(words, run / "checkpoints/step-000000", held_out[0])
    torch.testing.assert_close(got, logits(weights, held_out[0]), **CLOSE)


def test_transformers_makes_the_logits_of_the_trained_ranks(run, words, weights, held_out):
    tokens, following = held_out
    got = on_four_ranks(words, run / f"checkpoints/step-{STEPS:06d}", tokens)
    theirs = logits(run / "exports/hf", tokens)
    torch.testing.assert_close(theirs, got, **CLOSE)
    assert cross_entropy(theirs, following) < cross_entropy(logits(weights, tokens), following) - 0.1


def test_transformers_loads_shards_with_their_index(run, weights, home):
    done = write_hf(
        run / "transformed", home / "shards", names=TO_LLAMA, max_shard_size="100MB", beside=[weights / "config.json"]
    )
    assert done.files == len([*(home / "shards").glob("model-*-of-*.safetensors")]) > 1
    one, many = of_transformers(run / "exports/hf"), of_transformers(home / "shards")
    assert many.lm_head.weight is many.model.embed_tokens.weight
    assert one.state_dict().keys() == many.state_dict().keys()
    assert all(torch.equal(t, many.state_dict()[name]) for name, t in one.state_dict().items())


def test_a_line_has_the_tokens_of_transformers(words, weights):
    from transformers import AutoTokenizer

    data, theirs = open_data(compose(words).job.data, seed=0, allow=()), AutoTokenizer.from_pretrained(weights)
    for line in ("Now is the winter of our discontent\n", "  1592, “naïve”?! \t½\n"):
        assert data.encode(line) == theirs(line, add_special_tokens=False)["input_ids"]
        assert data.decode(data.encode(line)) == line


def val_loss(run: Path) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(line["val_loss"] for line in reversed([*lines]) if "val_loss" in line)


def test_a_folder_is_read_trained_and_written_by_model_hf(weights, home, held_out):
    tokens, following = held_out
    tuned = ["recipe=sft_hf_pp2_tp2", f"model.path={weights}", "logger=plain", "steps.evaluate.batches=1"]
    assert main([*tuned, "steps=[evaluate]", f"run_dir={home}/as_it_is"]) == 0
    theirs = cross_entropy(logits(weights, tokens), following)
    assert val_loss(home / "as_it_is") == pytest.approx(float(theirs), abs=1e-4)

    assert main([*tuned, f"train.steps={STEPS}", f"run_dir={home}/tuned"]) == 0
    after = cross_entropy(logits(home / "tuned/exports/hf", tokens), following)
    assert val_loss(home / "tuned") == pytest.approx(float(after), abs=1e-4)
    assert after < theirs - 0.1
