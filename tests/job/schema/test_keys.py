"""A guess corrects spelling; it never suggests another word, another number or the opposite."""

from __future__ import annotations

import pytest

from launcher.job.schema.did_you_mean import nearest

GUESSED = [
    ("stags", "stages"), ("stesp", "steps"), ("evry", "every"), ("wds", "wsd"), ("mpl", "mlp"), ("trian", "train"),
    ("batchsize", "batch_size"), ("shardsize", "shard_size"), ("crossentropy", "cross_entropy"),
    ("gradient_mean", "gradients_mean"), ("deferred", "deferred_init"), ("enable_fullgraph", "fullgraph"),
    ("cosine_with_restarts", "cosine_restarts"), ("micro_batches", "micro_batch_num"), ("h100", "h100_sxm"),
    ("cifar", "cifar10"), ("image", "images"), ("1f1bb", "1f1b"), ("const", "constant"), ("clip_nrm", "clip_norm"),
]  # fmt: skip
OTHERS = [
    # another word
    ("local_batch_size", "batch_size"), ("batch_size_per_gpu", "batch_size"), ("flash_attention", "attention"),
    ("more_memory", "less_memory"), ("gradients_sum", "gradients_mean"), ("gradients_max", "gradients_mean"),
    ("half_batch", "full_batch"), ("model_parallel", "data_parallel"), ("eager_init", "deferred_init"),
    ("dynamic_programming", "recursive_programming"), ("closestate", "openstate"), ("flavor", "lora"),
    ("save_strategy", "dataset_strategy"), ("mae", "mse"), ("ce", "bce"), ("adamax", "adamw"), ("nadam", "adamw"),
    ("binary_cross_entropy", "cross_entropy"), ("lm_large", "lm"), ("tensorboard_dir", "tensorboard"),
    # another number
    ("h200", "b200"), ("cifar100", "cifar10"), ("fp128", "fp16"), ("level4", "level3"), ("adam8bit", "adamw"),
    ("zero_bubble_h2", "zero_bubble_v"), ("gradient_fp16_sync", "gradient_fp32_sync"), ("mnist50k", "mnist5k"),
    # the opposite
    ("sync", "async"), ("even", "uneven"), ("unequal", "equal"), ("unbalanced", "balanced"), ("unsave", "save"),
    ("inconstant", "constant"), ("nonlinear", "linear"), ("nondeterministic", "deterministic"), ("no_save", "save"),
    ("desync_shared", "sync_shared"), ("cosine_no_restarts", "cosine_restarts"), ("decrypt", "encrypt"),
    ("loss_not_repeated_mean", "loss_repeated_mean"), ("gradient_fp32_async", "gradient_fp32_sync"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "name"), GUESSED, ids=[typed for typed, _ in GUESSED])
def test_letters_are_mended(typed: str, name: str) -> None:
    assert nearest(typed, [name, "zzz"]) == name


@pytest.mark.parametrize(("typed", "name"), OTHERS, ids=[typed for typed, _ in OTHERS])
def test_a_meaning_is_not_changed(typed: str, name: str) -> None:
    assert nearest(typed, [name, "zzz"]) is None


@pytest.mark.parametrize("word", ["none", "no", "off", "false", "null", "never"])
def test_a_word_for_nothing_is_no_choice_but_none(word: str) -> None:
    assert nearest(word, ["constant", "cosine", "linear"]) is None
    assert nearest(word, ["anomaly", "none", "limit"]) == "none"
