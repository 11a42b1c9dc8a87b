"""The loss of the first step is near the logarithm of the vocabulary; otherwise an initialization was lost."""

from __future__ import annotations

import math

import pytest

from launcher.__main__ import main
from tests.run.launching import losses, run, shape

OWN = ("model=null", "security.allow=[tests]", "model.vocab=64", "model.dim=64", "data.vocab_size=64", "steps=[train]")
LAYOUTS = {"1 rank": shape(), "2 ranks": shape(shard=2), "2 stages": shape(pp=2)}


@pytest.mark.parametrize("numbers", [False, True], ids=["recorded", "built whole"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_skips_its_init_without_memory_starts_near_chance(tmp_path, layout, numbers):
    words = [*OWN, "model._target_=tests.run.starting.Skips", f"model.numbers={numbers}", *LAYOUTS[layout]]
    first, *_ = losses(run(tmp_path / "run", *words, steps=1))
    assert abs(first - math.log(64)) <= 0.05 * math.log(64)


def test_a_weight_that_nobody_wrote_is_refused_before_anything_starts(tmp_path, capsys):
    words = [*OWN, "data=random_tokens", "data.seq_len=8", "model._target_=tests.run.starting.Forgets"]
    assert main(["recipe=lm_single", *words, f"run_dir={tmp_path / 'run'}", "logger=plain"]) == 2
    text = "scale is uninitialized memory: the constructor makes it with torch.empty or a similar function"
    assert f"  model: {text} and does not fill it; initialize it in the constructor\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
