"""Exports the low-rank adapters of a checkpoint: merged into their weights, or as a PEFT folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoint.box_bytes import BUFFER
from launcher.checkpoint.cast import numbers
from launcher.checkpoint.layout.derive_strategy import sources
from launcher.checkpoint.layout.shards import full_box, slabs
from launcher.checkpoint.layout.strategy import Entry, Strategy
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.store import check_apart, check_destination, fresh
from launcher.checkpoint.tensorfile.disk import sync, write_text
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.checkpoint.transform import PEAK, Report
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Box
from launcher.plan.values.precision import HALF

A, B = ".lora_A", ".lora_B"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix of the model's names in PEFT's files."""


@dataclass(frozen=True)
class Adapters:
    """The settings of a run's adapters. ``scale``, the factor of the product of B and A, is alpha over rank.

    ``wide`` is the dtype in which half-precision weights are written when adapters are added to them.
    """

    rank: int
    alpha: float
    wide: str = "float32"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapted_modules(strategy: Strategy) -> tuple[str, ...]:
    """Returns the first names of the modules that have an adapter."""
    return tuple(n.removesuffix(A) for n in strategy.only("param").entries if n.endswith(A))


def bases(strategy: Strategy) -> dict[str, str]:
    """Maps the first name of each weight that has an adapter to the weight's module."""
    return {strategy.named[f"{module}.weight"]: module for module in adapted_modules(strategy)}


def merged(strategy: Strategy, adapters: Adapters) -> dict[str, Entry]:
    """Returns the parameters and buffers without the adapters, in the dtypes that they are written in."""
    beside = {f"{module}{end}" for module in adapted_modules(strategy) for end in (A, B)}
    entries = strategy.only("param", "buffer").entries
    return {n: replace(e, dtype=_written(e, adapters)) for n, e in entries.items() if n not in beside}


def _written(entry: Entry, adapters: Adapters) -> str:
    return adapters.wide if entry.kind == "param" and entry.dtype in HALF else entry.dtype


def chunks(
    reader: Reader,
    name: str,
    adapters: Adapters | None,
    read_from: Mapping[str, str],
    part: Box | None = None,
) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, or of ``part`` of it, in order, after its adapter has been added.

    If ``adapters`` is ``None``, no adapter is added; otherwise the bytes have the dtypes that ``merged``
    returns. ``read_from`` is the result of ``sources``.
    """
    strategy = reader.checkpoint.strategy
    entry = strategy.entries[name]
    box = part or full_box(entry.layout.shape)
    module = None if adapters is None else bases(strategy).get(name)
    dtype = entry.dtype if adapters is None else _written(entry, adapters)
    if adapters is None or (module is None and dtype == entry.dtype):
        yield from reader.chunks(read_from[name], box)
        return

    factors = [] if module is None else [_numbers(reader, read_from[f"{module}{end}"]) for end in (A, B)]
    for slab in slabs(box, ITEMSIZE[dtype], BUFFER):
        total = _numbers(reader, read_from[name], slab).astype(dtype)
        if factors:
            (top, left), (bottom, right) = slab.lo, slab.hi
            a, b = factors
            total += adapters.scale * (b[top:bottom] @ a[:, left:right])
        yield np.ascontiguousarray(total).reshape(-1).view(np.uint8).data


def _numbers(reader: Reader, name: str, box: Box | None = None) -> np.ndarray[Any, np.dtype[Any]]:
    blob = reader.box(name, box or full_box(reader.checkpoint.strategy.entries[name].layout.shape))
    raw = np.frombuffer(blob.data, f"u{ITEMSIZE[blob.dtype]}")
    return numbers(raw, blob.dtype).reshape(blob.shape)


def write_peft(
    src: Path,
    folder: Path,
    adapters: Adapters,
    base: str | None,
    *,
    overwrite: bool,
    trust: Trust = ANYONE,
    averaged: bool = False,
    judge: Callable[[Path], None] | None = None,
) -> Report:
    """Writes only the adapters of ``src``, as ``PeftModel.from_pretrained`` reads them.

    ``base`` is the model that they belong to. With ``averaged``, their moving averages are written. ``judge``
    is as in ``write_hf``. Raises as ``transform`` does.
    """
    check_apart(src, folder)
    check_peft(folder, overwrite)
    reader = Reader(open_checkpoint(src, trust))
    strategy = reader.checkpoint.strategy
    read_from = sources(src, strategy, averaged)
    ours = {theirs(f"{m}{end}"): f"{m}{end}" for m in adapted_modules(strategy) for end in (A, B)}
    specs = {name: strategy.entries[own].spec for name, own in ours.items()}

    with fresh(folder) as new:
        done = write_stream(
            new / WEIGHTS, specs, lambda name: chunks(reader, ours[name], None, read_from), {"format": "pt"}
        )
        write_text(new / CONFIG, config(adapters, adapted_modules(strategy), base))
        sync(new)
        if judge is not None:
            judge(new)
    return Report(folder, files=1, bytes_read=reader.bytes_read, bytes_written=done.size, peak=PEAK)


def theirs(name: str) -> str:
    """Returns PEFT's name for an adapter's matrix; PEFT has a linear module for each matrix.

    >>> theirs("layers.0.attn.q.lora_A")
    'base_model.model.layers.0.attn.q.lora_A.weight'
    """
    return f"{PREFIX}{name}.weight"


def ours(name: str) -> str:
    """Returns our name for PEFT's: the inverse of ``theirs``."""
    return name.removeprefix(PREFIX).removesuffix(".weight")


def check_peft(folder: Path, overwrite: bool) -> None:
    """Raises ``FileExistsError`` unless ``folder`` is empty or, with ``overwrite``, has only adapters."""
    own = {CONFIG, WEIGHTS}
    check_destination(
        folder, overwrite, lambda at: all(p.name in own for p in at.iterdir()), "folder with only adapters"
    )


def config(adapters: Adapters, names: tuple[str, ...], base: str | None) -> str:
    """Returns the content of ``adapter_config.json``; PEFT has defaults for the other keys."""
    alpha = int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha
    data: Mapping[str, object] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [*names],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(data, indent=2, sort_keys=True) + "\n"
