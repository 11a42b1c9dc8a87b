"""Explains options that do not exist: which one is meant, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import Problem
from launcher.job.cures.suggestions import choice
from launcher.job.overrides import shell
from launcher.job.schema.misspelled import nearest

_MODELS = ("llama", "gpt", "gpt2", "mistral", "qwen", "qwen2", "qwen3", "gemma", "bert", "transformer")
_BUILDS = "hf builds a model of transformers from its folder, model.path; lm is a decoder like Llama"
_DATA = "the launcher downloads no data set"
_TEXTS = (
    "c4", "dclm", "fineweb", "fineweb_edu", "imdb", "openwebtext", "owt", "pile", "redpajama", "slimpajama",
    "the_pile", "tinystories", "wikipedia", "wikitext", "wikitext103", "wikitext2",
)  # fmt: skip
_CHATS = ("alpaca", "dolly", "oasst", "openassistant", "openhermes", "sharegpt", "slimorca", "ultrachat")
_IMAGES = ("cifar100", "coco", "food101", "imagenet", "imagenet1k", "tiny_imagenet")
ALMOST = {
    **{
        ("data", name): (
            f"{_DATA}; data=text data.path=FILES reads its text, data=tokens reads what prepare wrote",
            "",
        )
        for name in _TEXTS
    },
    **{
        ("data", name): (f"{_DATA}; data=chat data.path=FILES reads its conversations", "") for name in _CHATS
    },
    **{
        ("data", name): (f"{_DATA}; data=images data.root=FOLDER reads its images, one folder per class", "")
        for name in _IMAGES
    },
    ("data", "cifar"): (f"{_DATA}; data=cifar10 data.root=FOLDER reads the files of CIFAR-10", ""),
    ("data", "fashion_mnist"): (f"{_DATA}; data=idx data.root=FOLDER reads its files", ""),
    **{("model", name): (_BUILDS, "") for name in _MODELS},
    ("optim", "adam"): ("it is adamw without decay", "optim=adamw optim.weight_decay=0"),
    ("loss", "ce"): ("it is cross_entropy", "loss=cross_entropy"),
    ("loss", "binary_cross_entropy"): ("it is bce", "loss=bce"),
    ("data", "mnist"): ("idx reads its files, mnist5k is 5000 of its digits", ""),
}
"""Options of other programs: an explanation and an override for our counterpart."""


def of_other_programs(group: str, option: str) -> tuple[str, str] | None:
    """The explanation and the override of ``ALMOST``; ``None`` for any other option."""
    return ALMOST.get((group, option.lower().rpartition("/")[2].replace("-", "_")))


def no_option(group: str, option: str, options: Sequence[str]) -> Problem:
    """The problem of an unknown option of a group, with the most similar one as the cure."""
    word, title = ("step", "steps") if group == "steps" else ("option", "options")
    if (known := of_other_programs(group, option)) is not None:
        why, fixed = known
        return Problem(group, f"unknown {word} {option!r}: {why} ({title}: {', '.join(options)})", fixed)
    text = f"unknown {word} {option!r}{choice(option, options, title)}"
    hint = nearest(option, options)
    if hint is None:
        return Problem(group, text)
    return Problem(group, text, shell(f"steps=[{hint}]" if group == "steps" else f"{group}={hint}"))
