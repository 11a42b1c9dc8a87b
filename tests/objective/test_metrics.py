"""Metrics by name, compared with their definitions, with ties and NaN included."""

from __future__ import annotations

from math import isnan, log, nan

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.data import text_tokenizer, train_byte_pairs
from launcher.data.text_windows import open_text
from launcher.errors import RunError
from launcher.job.schema.data import Text
from launcher.job.schema.objective import Accuracy, BitsPerByte, CrossEntropy, Perplexity, TopK
from launcher.objective.build import build_metrics
from launcher.objective.metrics import Metric, values

ACCURACY, TOP = build_metrics((Accuracy(), TopK(k=2)), CrossEntropy())
LOGITS = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0], [nan, 1.0, 0.0, 0.0]])


def of(metric: Metric, logits: Tensor, target: list[int]) -> list[float]:
    found: list[float] = metric.sums(logits, torch.tensor(target)).tolist()
    return found


def test_of_equal_logits_the_first_class_is_the_larger_and_a_nan_is_no_answer():
    assert of(ACCURACY, LOGITS, [1, 0, 3, 1]) == [3, 4]
    assert of(ACCURACY, LOGITS, [2, 1, 2, 0]) == [0, 4]
    assert of(TOP, LOGITS, [2, 1, 2, 1]) == [4, 4]
    assert of(TOP, LOGITS, [0, 2, 1, 0]) == [0, 4]


def test_ignored_targets_are_left_out_and_invalid_classes_make_a_metric_nan():
    assert of(ACCURACY, LOGITS, [1, -100, 0, -100]) == [1, 2]
    assert isnan(of(ACCURACY, LOGITS, [1, 4, 0, 0])[0])


def test_classes_may_be_dim_1():
    logits = torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 5, (3, 2, 4), generator=torch.Generator().manual_seed(1))
    assert ACCURACY.sums(logits, target).tolist() == [(logits.argmax(1) == target).sum().item(), 24]


def test_bytes_of_tokens_are_those_of_the_text():
    text = "To be, or not to be: that is the question; täglich grüßt — 你好\r\n" * 40
    tokenizer = train_byte_pairs.train(text, 300)
    sizes = text_tokenizer.token_bytes(tokenizer)
    assert sum(sizes[i] for i in text_tokenizer.encode(tokenizer, text)) == len(text.encode())
    assert max(sizes) > 3


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bits_per_byte_is_the_cross_entropy_of_the_bytes(tokenizer):
    settings = Text(name="text", tokenizer=tokenizer, vocab_size=300 if tokenizer == "bpe" else 256, seq_len=16)
    data = open_text(settings)
    (metric,) = build_metrics((BitsPerByte(),), CrossEntropy(), token_bytes=data.token_bytes)
    target = data.val.targets(torch.arange(4).numpy())
    logits = torch.randn(4, 16, settings.vocab_size, dtype=torch.float64)
    total, count = metric.sums(logits, target).tolist()
    assert data.decode is not None
    assert count == sum(len(data.decode([int(t)]).encode()) for t in target.flatten())
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten().long(), reduction="sum").item() / log(2) / count
    assert metric.value(total, count) == pytest.approx(want, rel=1e-12)


def test_a_perplexity_beyond_all_floats_is_infinite():
    (metric,) = build_metrics((Perplexity(),), CrossEntropy())
    assert metric.value(800.0, 1.0) == float("inf")


def test_a_metric_without_samples_is_omitted_and_a_nan_is_named():
    assert values((ACCURACY, TOP), [(0.0, 0.0), (1.0, 4.0)], "step 3") == {"top_2": 0.25}
    with pytest.raises(RunError) as caught:
        values((ACCURACY, TOP), [(1.0, 2.0), (nan, 0.0)], "step 3")
    assert str(caught.value) == (
        "step 3: the metric top_2 is NaN (sum nan, count 0). Look at the metric, or at the data of this step"
    )
