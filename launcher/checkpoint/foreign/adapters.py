"""Low-rank adapters in a checkpoint: added to the weights that they are beside, or as a folder of PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoint.atomic_folder import check_apart, check_destination, fresh
from launcher.checkpoint.chunked import BUFFER
from launcher.checkpoint.foreign.cast import numbers
from launcher.checkpoint.layout.derived import sources
from launcher.checkpoint.layout.shards import slabs, whole
from launcher.checkpoint.layout.strategy import Entry, Strategy
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.tensorfile.durable import sync, write_text
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.checkpoint.transform import PEAK, Report
from launcher.plan.values.facts import HALF, ITEMSIZE
from launcher.plan.values.layout import Box
from launcher.plan.values.trust import ANYONE, Trust

A, B = ".lora_A", ".lora_B"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of names in PEFT's files, before those of the model."""


@dataclass(frozen=True)
class Adapters:
    """Those of a run: ``scale`` is what their products count, alpha over rank.

    ``wide``: the dtype that weights kept in half precision are written in, where adapters are added.
    """

    rank: int
    alpha: float
    wide: str = "float32"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def modules(strategy: Strategy) -> tuple[str, ...]:
    """First names of the modules that have one."""
    return tuple(n.removesuffix(A) for n in strategy.only("param").entries if n.endswith(A))


def bases(strategy: Strategy) -> dict[str, str]:
    """The module of each weight that an adapter is beside, by the first name of the weight."""
    return {strategy.named[f"{module}.weight"]: module for module in modules(strategy)}


def merged(strategy: Strategy, adapters: Adapters) -> dict[str, Entry]:
    """Parameters and buffers that are left when adapters are added to their weights, as they are written."""
    beside = {f"{module}{end}" for module in modules(strategy) for end in (A, B)}
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
    """All bytes of a tensor, or of ``part`` of it, in order, with its adapter added where it has one.

    ``adapters``: ``None`` where none are to be added; else bytes are in the dtypes of ``merged``.
    ``read_from``: where each is, as ``sources`` has it.
    """
    strategy = reader.checkpoint.strategy
    entry = strategy.entries[name]
    box = part or whole(entry.layout.shape)
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
    blob = reader.box(name, box or whole(reader.checkpoint.strategy.entries[name].layout.shape))
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
    """The adapters of ``src`` alone, as ``PeftModel.from_pretrained`` reads them; ``base``: of what model.

    ``averaged``: their moving averages. ``judge``: as of ``write_hf``.
    """
    check_apart(src, folder)
    check_peft(folder, overwrite)
    reader = Reader(open_checkpoint(src, trust))
    strategy = reader.checkpoint.strategy
    read_from = sources(src, strategy, averaged)
    ours = {theirs(f"{m}{end}"): f"{m}{end}" for m in modules(strategy) for end in (A, B)}
    specs = {name: strategy.entries[own].spec for name, own in ours.items()}

    with fresh(folder) as new:
        done = write_stream(
            new / WEIGHTS, specs, lambda name: chunks(reader, ours[name], None, read_from), {"format": "pt"}
        )
        write_text(new / CONFIG, config(adapters, modules(strategy), base))
        sync(new)
        if judge is not None:
            judge(new)
    return Report(folder, files=1, bytes_read=reader.bytes_read, bytes_written=done.size, peak=PEAK)


def theirs(name: str) -> str:
    """What PEFT calls it, who keeps each of the two in a linear module of its own.

    >>> theirs("layers.0.attn.q.lora_A")
    'base_model.model.layers.0.attn.q.lora_A.weight'
    """
    return f"{PREFIX}{name}.weight"


def ours(name: str) -> str:
    """The name that ``theirs`` was given."""
    return name.removeprefix(PREFIX).removesuffix(".weight")


def check_peft(folder: Path, overwrite: bool) -> None:
    """Raises ``FileExistsError`` where something else is in the place."""
    own = {CONFIG, WEIGHTS}
    check_destination(
        folder, overwrite, lambda at: all(p.name in own for p in at.iterdir()), "folder of adapters alone"
    )


def config(adapters: Adapters, names: tuple[str, ...], base: str | None) -> str:
    """``adapter_config.json``: PEFT has defaults for all that is not said."""
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
