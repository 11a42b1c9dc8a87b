"""A row of a table of measurements: a model, a layout, and what was measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FRAMEWORKS = {
    "ultrascale": "nanotron", "ultrascale_scaling": "nanotron", "vtrain_single": "megatron_deepspeed",
    "vtrain_multi": "megatron_deepspeed", "torchtitan": "torchtitan", "automodel": "torchtitan",
}  # fmt: skip
TIMES = ("step_time", "tokens_per_s_per_gpu", "mfu", "model_tflops_per_gpu")
MEMORY = ("memory", "failed", "params_grads_optimizer_memory", "activation_memory")
SHAPE = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "tp", "pp", "dp", "global_batch")


class UnusableRow(Exception):
    """The row leaves something out, or has a value that no request can express."""


@dataclass(frozen=True)
class Row:
    """The numbers of a row's model and layout. ``raw``: the row as it is in the table."""

    raw: dict[str, str]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    micro: int
    tp: int
    pp: int
    vpp: int
    dp: int
    zero: int
    recompute: str
    precision: str
    ranks: int

    @property
    def framework(self) -> str:
        return FRAMEWORKS.get(self.raw["source"], "megatron")

    @property
    def gated(self) -> bool:
        """Whether the feed-forward is gated, as Llama's."""
        return "llama" in self.raw["model"].lower()

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the head, judged by the number of parameters in the row."""
        stated = float(self.raw["params"] or self.parameters)
        return stated < self.parameters - self.vocab * self.hidden / 2

    @property
    def parameters(self) -> float:
        """The number of parameters with an untied head, without norms and biases."""
        kv = self.hidden * self.kv_heads / self.heads
        block = 2 * self.hidden * (self.hidden + kv) + (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * block + 2 * self.vocab * self.hidden

    @property
    def micros(self) -> int:
        """Micro batches per step. Raises ``Unsaid`` if that is not an integer."""
        count, rest = divmod(self.batch, self.dp * self.micro)
        if rest or not count:
            raise UnusableRow(
                f"a batch of {self.batch} is no number of micro batches of {self.dp} x {self.micro}"
            )
        return count


def parsed(raw: dict[str, str]) -> Row:
    """Parse a row. Raises ``Unsaid``."""
    if raw["metric"] not in (*TIMES, *MEMORY):
        raise UnusableRow(f"metric {raw['metric']}: neither time nor memory")
    missing = [k for k in SHAPE if not raw[k]]
    if missing:
        raise UnusableRow(f"the row does not say {', '.join(missing)}")
    for key in ("cp", "ep"):
        if number(raw, key) > 1:
            raise UnusableRow(f"{key} {raw[key]}: only 1 can be asked for")
    precision = raw["precision"].lower() or "bf16"
    if precision not in ("bf16", "fp16"):
        raise UnusableRow(f"precision {raw['precision']}: train.precision has none of these")
    heads = number(raw, "heads")
    ranks = number(raw, "tp") * number(raw, "pp") * number(raw, "dp")
    if raw["n_gpus"] and ranks != number(raw, "n_gpus"):
        raise UnusableRow(f"tp x pp x dp are {ranks} of {raw['n_gpus']} devices")
    return Row(
        raw, layers=number(raw, "layers"), hidden=number(raw, "hidden"), heads=heads,
        kv_heads=number(raw, "kv_heads", heads), ffn=number(raw, "ffn"), vocab=number(raw, "vocab"),
        seq=number(raw, "seq"), batch=number(raw, "global_batch"), micro=number(raw, "micro_batch"),
        tp=number(raw, "tp"), pp=number(raw, "pp"), vpp=number(raw, "vpp"), dp=number(raw, "dp"),
        zero=int((raw["zero_stage"] or "0")[0]), recompute=raw["recompute"] or "none", precision=precision,
        ranks=ranks,
    )  # fmt: skip


def number(raw: dict[str, str], key: str, default: int = 1) -> int:
    return int(float(raw[key])) if raw[key] else default


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    rows = list(rows)
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, [*dict.fromkeys(key for row in rows for key in row)])
        out.writeheader()
        out.writerows(rows)
