"""Guesses what a wrong value means: 1k is 1000, float16 is fp16, None is null."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from launcher.job.schema import keys
from launcher.job.schema.did_you_mean import nearest
from launcher.job.schema.paths import RUN, scheme

NOTHING = ("none", "nil", "null", "nan", "nothing")
OFF = ("off", "no", "never", "false", "disable", "disabled", "unlimited", "inf", "infinity")
YES = ("yes", "on", "y", "t", "true", "enable", "enabled", "1")
NO = ("no", "off", "n", "f", "false", "disable", "disabled", "none", "0")
SWITCHED = (
    "train.clip_norm", "train.eval_every", "train.loss_scale", "train.compile", "train.ema",
    "train.early_stop", "parallel.recompute", "checkpoint.every", "checkpoint.encrypt",
    "debug.limit", "debug.overfit", "parallel.hsdp", "parallel.group_file", "parallel.transformer_opt",
    "parallel.local_norm.dump", "parallel.param_strategy.save", "parallel.param_strategy.load",
    "parallel.operator_strategy.save", "parallel.operator_strategy.load",
)  # fmt: skip
"""Keys at which null switches something off, so 0 and false can only mean null."""

NULLS = (("train.loss_scale", "dynamic"), ("parallel.hsdp", "no_shard"))
"""Words of other programs for what null means at a key."""

NAMES = ("name", "runs", "run_dir", "parallel.local_norm.dump", "steps.sample.prompt")
"""Keys whose text may consist of digits."""

SIZES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "g": 1e9, "G": 1e9, "b": 1e9, "B": 1e9, "t": 1e12, "T": 1e12}
"""The factor of each suffix of a count. A small ``m`` is missing, since it may mean minutes."""
UNITS = {
    "threshold": {
        "b": 1 / 1024, "kb": 1, "kib": 1, "mb": 1024, "mib": 1024, "gb": 1024**2, "k": 1, "m": 1024,
    },
    "config": {
        "kb": 1 / 1024, "kib": 1 / 1024, "mb": 1, "mib": 1, "gb": 1024, "gib": 1024, "m": 1, "g": 1024,
    },
    "timeout_s": {
        "ms": 1e-3, "s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "mins": 60,
        "minute": 60, "minutes": 60, "h": 3600, "hour": 3600, "hours": 3600,
    },
    "latency_us": {"us": 1, "ms": 1e3, "ns": 1e-3, "s": 1e6},
    "gb_per_s": {
        "GB/s": 1, "GBps": 1, "GB": 1, "MB/s": 1e-3, "MBps": 1e-3,
        "Gb/s": 0.125, "Gbps": 0.125, "gbps": 0.125, "Gbit/s": 0.125, "gbit/s": 0.125,
    },
}  # fmt: skip
"""The units that may follow a number, by the last part of the key, as multiples of the key's own unit.

Capital letters count only where a small b means bits.
"""

WORDS = {
    "fp16": ("float16", "half", "f16", "16", "16-mixed", "16-true", "torch.float16"),
    "bf16": ("bfloat16", "bfloat", "bf16-mixed", "bf16-true", "torch.bfloat16"),
    "fp32": ("float32", "float", "single", "f32", "full", "32", "32-true", "torch.float32"),
    "fp64": ("float64", "double", "f64", "64", "64-true", "torch.float64"),
    "cuda": ("gpu", "gpus", "nvidia"),
    "zero_bubble_h1": ("zb_h1", "zb-h1", "zbh1", "zb1", "interleavedzerobubble"),
    "zero_bubble_v": ("zb_v", "zb-v", "zbv", "zbvzerobubble"),
    "1f1b": ("one_f_one_b", "pipedream", "pipedream_flush", "1f-1b", "1f_1b"),
    "bar": ("tqdm", "rich"),
    "dualpipe_v": ("dualpipe", "dualpipev"),
    "semi_auto": ("semi_auto_parallel", "semi-auto"),
    "full_batch": ("fullbatch", "full-batch"),
    "level1": ("zero1", "stage1", "os"),
    "level2": ("zero2", "stage2", "os_g", "shard_grad_op"),
    "level3": ("zero3", "stage3", "p_g_os", "fsdp", "full_shard"),
}
"""Our words, and their names in other programs."""


def readings(key: str, note: Any, bad: Any) -> Iterator[Any]:
    """Yields every value of type ``note`` that ``bad`` at ``key`` may mean, the likeliest first."""
    for good in _candidates(key, note, bad):
        if (good, type(good)) != (bad, type(bad)) and keys.accepts(note, good):
            yield good


def _candidates(key: str, note: Any, bad: Any) -> Iterator[Any]:
    # one of the schema's words
    if keys.accepts(note, None) and _nothing(key, bad):
        yield None
    flag = _flag(bad)
    if flag is not None and keys.accepts(note, True) and not keys.accepts(note, 0.5):
        yield flag
    words = {str(w): w for w in keys.literals(note)}
    word = word_of(bad, list(words))
    if word:
        yield words[word]

    # a number, a group of keys or text in another notation
    yield from _numbers(key, note, bad)
    yield from _groups(key, bad)
    if isinstance(bad, str):
        yield from _texts(key, bad)
    elif type(bad) is int and key in NAMES:  # 1.10 would become 1.1
        yield str(bad)

    # a list with other items, or without its brackets
    if isinstance(bad, list):
        yield [_item(key, item) for item in bad]
    elif bad is not None and not isinstance(bad, Mapping):
        yield [bad]


def _nothing(key: str, bad: Any) -> bool:
    """Returns true if ``bad`` can only mean null at ``key``."""
    if bad == -1 and not isinstance(bad, bool):
        return key != "parallel.hsdp"  # for other programs -1 is "all"; parallel.hsdp takes it as a size
    if key in SWITCHED and (bad is False or bad == 0 or bad == float("inf")):
        return True
    word = str(bad).strip().lower() if isinstance(bad, str) else None
    if (key, word) in NULLS:
        return True
    return word in NOTHING or word == "auto" or (key in SWITCHED and word in ("", *OFF))


def _flag(bad: Any) -> bool | None:
    word = str(bad).strip().lower()
    if word in YES:
        return True
    return False if word in NO or bad is None else None


def word_of(bad: Any, words: Sequence[str]) -> str | None:
    """Returns the one of ``words`` that ``bad`` is a synonym or a misspelling of.

    Returns ``None`` if there is none.
    """
    if isinstance(bad, Mapping | list) or bad is None or not words:
        return None
    text = str(bad).strip().lower()

    # the word itself or a synonym, then the same letters and digits
    same = [w for w in words if text in (w.lower(), *WORDS.get(w, ()))]
    same += [w for w in words if _squeezed(w) == _squeezed(text)]
    if same:
        return same[0]

    # a level by its number, such as zero-2
    levels = [w for w in words if re.fullmatch(r"level\d", w) and w[-1] == re.sub(r"\D", "", text)]
    if levels and re.fullmatch(r"(l|lv|lvl|level|stage|zero|o|os)?[ _-]?\d(\.0)?", text):
        return levels[0]

    # a misspelling, unless several words begin with it
    begun = [w for w in words if w.startswith(text)]
    return None if len(begun) > 1 or text == "auto" else nearest(text, words)


def _squeezed(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _numbers(key: str, note: Any, bad: Any) -> Iterator[Any]:
    number = number_of(key, bad)
    if number is None and keys.accepts(note, 0.5) and isinstance(bad, str):
        number = _fraction(bad)
    if number is not None:
        yield int(number) if float(number).is_integer() and abs(number) < 2**53 else number
        yield number


def number_of(key: str, bad: Any) -> float | None:
    """Returns the number that ``bad`` means, in the unit of ``key``; ``None`` if it is not a number."""
    if isinstance(bad, int | float) and not isinstance(bad, bool):
        return float(bad)
    if not isinstance(bad, str) or len(bad) > 40:
        return None

    # 1_000 and 1,000
    text = bad.strip().strip("'\"").replace("_", "")
    if re.fullmatch(r"\d{1,3}(,\d{3})*,000", text):
        text = text.replace(",", "")

    # 0x10, but not 010: in YAML it may be 8
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,12}", text):
        return float(int(text, 16))
    if re.match(r"[+-]?0\d", text):
        return None

    # 4*1024, 2x8, 2**20 and 2^20
    product = re.fullmatch(r"(\d+)\s*(\*|[xX])\s*(\d+)", text)
    if product:
        return float(int(product[1]) * int(product[3]))
    power = re.fullmatch(r"(\d+)\s*(\*\*|\^)\s*(\d+)", text)
    if power:
        base = int(power[1])
        exponent = int(power[3])
        return float(base**exponent) if base <= 1024 and exponent <= 40 else None

    # a number with an optional unit
    got = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z/]*)", text)
    if not got:
        return None
    name = key.rpartition(".")[2]
    units = {"": 1.0, **UNITS[name]} if name in UNITS else SIZES
    factor = units.get(got[2], None if units is SIZES or name == "gb_per_s" else units.get(got[2].lower()))
    return None if factor is None else float(f"{float(got[1]) * factor:.12g}")


def _fraction(bad: str) -> float | None:
    """Returns the value of 10%, 1/8 or 0,25; ``None`` for other text."""
    text = bad.strip()
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if percent:
        return float(percent[1]) / 100
    ratio = re.fullmatch(r"(\d+)\s*/\s*(\d+)", text)
    if ratio and int(ratio[2]):
        return int(ratio[1]) / int(ratio[2])
    comma = re.fullmatch(r"0,(\d\d+)", text)
    return float(f"0.{comma[1]}") if comma else None


def _item(key: str, item: Any) -> Any:
    """Returns an item of a list; text that means a number becomes the number."""
    if isinstance(item, list):
        return [_item(key, i) for i in item]
    number = number_of(key, item)
    if number is None:
        return item
    return int(number) if number.is_integer() else number


MAIN = {"train.ema": "decay", "train.early_stop": "patience"}
"""The key of a group that a bare number means."""
BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs")
"""Backends of torch.compile that train.compile may name in place of its group of keys."""


def _groups(key: str, bad: Any) -> Iterator[Any]:
    """Yields a group of keys that a single word may mean."""
    if key == "parallel.hsdp":
        if bad is True or (isinstance(bad, str) and bad.lower() in (*YES, "auto")):
            yield {}
        if isinstance(bad, int) and not isinstance(bad, bool):
            yield {"shard_size": bad}
        level = word_of(bad, ["level1", "level2", "level3"])
        if level:
            yield {"optimizer_level": level}

    # a switch, or the number that matters most
    on = bad is True or (isinstance(bad, str) and bad.lower() in YES)
    if key in ("train.compile", "train.ema", "train.early_stop") and on:
        yield {}
    if key == "parallel.recompute" and (on or bad == "full"):
        yield {"modules": "*"}  # as in other programs, whose switch recomputes all modules
    if key == "parallel.recompute" and bad == "selective":
        yield {"modules": "*", "policy": bad}
    if key == "parallel.recompute" and isinstance(bad, str) and re.fullmatch(r"[\w.*]*[.*][\w.*]*", bad):
        yield {"modules": bad}
    if key == "train.compile" and isinstance(bad, str):
        yield {"backend" if bad in BACKENDS else "mode": bad}
    if key in ("logger.wandb", "logger.trackio") and isinstance(bad, str) and bad.lower() not in (*YES, *NO):
        yield {"project": bad}
    if key in MAIN and isinstance(bad, int | float) and not isinstance(bad, bool):
        yield {MAIN[key]: bad}

    # fusion: a mode, a size or indices
    if re.fullmatch(r"parallel\.comm_fusion\.(allreduce|allgather|reducescatter)", key):
        if bad in ("auto", "size"):
            yield {"mode": bad}
        size = number_of(f"{key}.config", bad)
        if isinstance(bad, list):
            yield {"mode": "index", "config": bad}
        elif size is not None:
            yield {"mode": "size", "config": int(size) if size.is_integer() else size}

    # the only key that the word can mean
    flag = _flag(bad)
    if key == "parallel.comm_fusion" and flag is not None:
        yield {"openstate": flag}
    if key == "parallel.pipeline" and isinstance(bad, int) and not isinstance(bad, bool):
        yield {"stages": bad}


def _texts(key: str, bad: str) -> Iterator[Any]:
    """Yields lists, groups of keys or similar text that a text may mean."""
    # lists and groups of keys
    inner = bad.strip()
    if inner[:1] == "(" and inner[-1:] == ")":
        inner = f"[{inner[1:-1].rstrip(', ')}]"
    if inner[:1] in ("[", "{") and len(inner) < 1000:
        yield _yaml(inner)
    elif "," in inner:
        yield [_yaml(i.strip()) for i in inner.split(",") if i.strip()]

    # the name of a run
    if key == "name":
        yield re.sub(r"[^A-Za-z0-9._-]+", "-", bad).strip("-.")

    # a word of the shell in a path
    if bad.startswith(("~", "$")):
        expanded = os.path.expandvars(os.path.expanduser(bad))
        if expanded.startswith("/"):
            yield expanded
        return

    # a URL of a file; any other URL without a password, which is not a path
    if re.match(r"file:/(?!/[^/])", bad):
        yield re.sub(r"\Afile:/+", "/", bad)
        return
    if "://" in bad or scheme(bad):
        yield re.sub(r"://[^/@]*@", "://", bad)
        return

    # paths: in the run folder, absolute, or with the suffix of JSON or YAML
    if bad.startswith(RUN):
        parts = [part.lstrip(".") for part in bad.removeprefix(RUN).split("/")]
        name = "/".join(filter(None, parts))
        yield from (f"{RUN}{name}", f"{RUN}mine/{name}")
    if bad and key.endswith("calibrate.to"):
        yield re.sub(r"[.][^./]*$", "", bad) + ".yaml"
    if bad and not bad.startswith(RUN):
        yield os.path.abspath(bad)
    if bad and not key.endswith(".load"):  # the name of a file to read does not change
        stem = re.sub(r"[.][^./]*$", "", bad)
        yield from (f"{stem}.json", os.path.abspath(f"{stem}.json"))


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
