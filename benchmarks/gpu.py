"""One GPU: steps of a 1B Llama against a hand-written loop, its memory against the plan, and its kernels.

About ten minutes on a free GPU. Every row trains in bf16 with weights in fp32, ours and the hand-written loop
in turn in one process, from the same weights, on the same batches:

    python -m benchmarks.gpu [--write benchmarks/results] [--blocks 6] [--steps 4] [--only WORD]
    python -m benchmarks.gpu --only plain --row "half=train.precision=fp16; train.loss_scale=1024"
    python -m benchmarks.gpu model.layers=8

``--write`` keeps ``gpu-<device>.md``, and ``gpu-<device>.yaml``: the device as a fragment of a cluster's
description. ``--dry`` does the same with a tiny model on the CPU, so that all of it can be tried where there
is no GPU; its times mean nothing. The third is for a GPU of less than 60 GB.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_kernels import REAL, TINY, Kernels, describe, measure
from benchmarks.gpu_training import Measured, work
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema.components import RandomTokens
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.values.facts import COMPUTE
from launcher.planner.plan_job import plan_job
from launcher.runtime.processes.start import run_ranks
from launcher.runtime.training.device_peaks import peak_flops

ALWAYS = (
    "recipe=lm_single",
    "data=random_tokens",
    "model.tied=false",
    "steps=[train]",
    "train.precision=bf16",
)
# TinyLlama's shape: 1.1 billion parameters, four micro batches of 8192 tokens
LLAMA_1B = (
    "data.vocab_size=32000", "data.seq_len=2048", "model.dim=2048", "model.layers=22", "model.heads=32",
    "model.kv_heads=4", "model.ffn_dim=5632", "train.batch_size=16", "parallel.pipeline.micro_batch_num=4",
)  # fmt: skip
TINY_LM = (
    "data.vocab_size=128", "data.seq_len=16", "model.dim=32", "model.layers=2", "model.heads=4",
    "model.kv_heads=2", "model.ffn_dim=64", "train.batch_size=4", "parallel.pipeline.micro_batch_num=2",
)  # fmt: skip
FULL = "parallel.recompute={modules: layers.*, policy: full}"
SELECTIVE = "parallel.recompute={modules: layers.*, policy: selective}"
COMPILE = "train.compile={modules: layers.*, backend: BACKEND}"
ROWS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "recompute full": (FULL,),
    "recompute selective": (SELECTIVE,),
    "compile": (COMPILE,),
    "compile, recompute full": (COMPILE, FULL),
    "compile, recompute selective": (COMPILE, SELECTIVE),
}
"""What each is trained with besides; one that this version has no setting for, or refuses, says so."""


@dataclass(frozen=True)
class Case:
    """A row; ``refused``: why it could not be tried."""

    name: str
    plan: Plan | None = None
    measured: Measured | None = None
    refused: str = ""


@dataclass(frozen=True)
class Device:
    """``peak``: operations a second in ``dtype``, if known; ``memory``: its bytes, or the machine's."""

    kind: str
    name: str
    dtype: str
    peak: float | None
    memory: int

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def device_of(job: Job, dry: bool) -> Device:
    """The one that is there. A rank asks for it: this process is to stay fit for forking."""
    dtype = COMPUTE[job.train.precision]
    if dry:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", "cpu dry", dtype, None, memory)
    name, memory = run_ranks(describe, 1, device="cuda", alone=True)[0]
    return Device("cuda", name, dtype, peak_flops(name, dtype), memory)


def cases(
    rows: dict[str, tuple[str, ...]], device: Device, asked: Sequence[str], args: argparse.Namespace
) -> Iterator[Case]:
    """Each row in a process of its own, so that one leaves the next no memory in pieces."""
    for name, overrides in rows.items():
        backend = "aot_eager" if args.dry else "inductor"
        words = [w.replace("BACKEND", backend) for w in overrides]
        try:
            job = compose([*asked, *words]).job
            plan = plan_job(job)
        except RequestError as error:
            yield Case(name, refused=f"not tried: {str(error).partition(' (valid here')[0]}")
            continue
        run = partial(work, job=job, plan=plan, blocks=args.blocks, steps=args.steps)
        threads = 1 if args.dry else os.cpu_count() or 1
        yield Case(name, plan, run_ranks(run, 1, device=device.kind, threads=threads, start="spawn")[0])


def kernels(job: Job, plan: Plan, device: Device, dry: bool) -> Kernels:
    assert isinstance(job.data, RandomTokens)
    shape = (plan.sizes.micro_batch, job.data.seq_len)
    run = partial(measure, model=job.model, shape=shape, dtype=device.dtype, size=TINY if dry else REAL)
    return run_ranks(run, 1, device=device.kind, alone=True, start="spawn")[0]


HEAD = (
    "row", "ours ms", "by hand ms", "speed against by hand", "tokens/s", "TFLOP/s", "MFU",
    "planned GB", "measured GB", "apart", "reserved GB", "losses apart", "first step s",
)  # fmt: skip


def row(case: Case, job: Job, device: Device) -> list[str]:
    """The speed is the median over neighbouring blocks; memory is rank 0's."""
    if case.plan is None or case.measured is None:
        return [case.name, case.refused, *[""] * (len(HEAD) - 2)]
    assert isinstance(job.data, RandomTokens)
    m, planned = case.measured, case.plan.estimate.memory[0].total
    step = statistics.median(m.ours)
    speed = statistics.median(b / a for a, b in zip(m.ours, m.by_hand, strict=True))
    rate = case.plan.estimate.flops / step
    apart = max(abs(a - b) / abs(b) for a, b in m.losses)
    return [
        case.name,
        f"{step * 1e3:.1f}",
        f"{statistics.median(m.by_hand) * 1e3:.1f}",
        f"{speed:.3f}x",
        f"{job.train.batch_size * job.data.seq_len / step:.0f}",
        f"{rate / 1e12:.4g}",
        share(rate, device.peak),
        *(f"{n / 1e9:.4g}" for n in (planned, m.peak)),
        f"{planned / m.peak - 1:+.1%}",
        "" if m.reserved is None else f"{m.reserved / 1e9:.4g}",
        f"{apart:.1e}",
        f"{m.first:.1f}",
    ]


def share(rate: float, peak: float | None) -> str:
    """Of the peak, where that is known."""
    return "" if peak is None else f"{rate / peak:.1%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def page(device: Device, steps: list[list[str]], found: Kernels, shape: str, said: str) -> str:
    """``gpu-<device>.md``."""
    blocks = [
        [b.kind, f"{b.forward * 1e3:.3f}", f"{b.backward * 1e3:.3f}", f"{b.flops / b.forward / 1e12:.4g}",
         share(b.flops / b.forward, device.peak)]
        for b in found.blocks
    ]  # fmt: skip
    products = [
        [
            f"{p.m} x {p.k} x {p.n}",
            f"{p.seconds * 1e3:.4g}",
            f"{p.flops / 1e12:.4g}",
            share(p.flops, device.peak),
        ]
        for p in found.products
    ]
    copies = [[c.what, f"{c.nbytes / 2**20:.0f}", f"{c.rate / 1e9:.1f}"] for c in found.copies]
    peak = "not known" if device.peak is None else f"{device.peak / 1e12:g} TFLOP/s"
    return "\n".join([
        f"# {device.name}", "",
        said, f"Peak in {device.dtype}: {peak}; memory {device.memory / 1e9:.1f} GB.", "",
        "## Steps", "", *table(HEAD, steps), "",
        f"## Blocks, {shape}", "",
        *table(("kind", "forward ms", "backward ms", "forward TFLOP/s", "of peak"), blocks), "",
        "## Products", "", *table(("m x k x n", "ms", "TFLOP/s", "of peak"), products), "",
        "## Copies", "", *table(("what", "MiB", "GB/s"), copies), "",
    ])  # fmt: skip


def fragment(device: Device, found: Kernels, shape: str, said: str) -> str:
    """``gpu-<device>.yaml``: numbers in SI units, measured; only ``peak_tflops`` is from a data sheet."""
    peak = "null" if device.peak is None else f"{device.peak / 1e12:g}"
    lines = [
        f"# One device of a cluster, as measured: {said}",
        f"device: {device.name}",
        f"dtype: {device.dtype}  # of products and blocks",
        f"memory_gb: {device.memory / 1e9:.1f}  # all of it",
        f"peak_tflops: {peak}  # by the data sheet, dense; null: not known",
        "matmul:  # m x k times k x n; efficiency is the share of peak_tflops",
    ]
    for p in found.products:
        part = "null" if device.peak is None else f"{p.flops / device.peak:.3f}"
        lines.append(
            f"  - {{m: {p.m}, k: {p.k}, n: {p.n}, tflops: {p.flops / 1e12:.4g}, efficiency: {part}}}"
        )
    lines.append(f"copy_gb_per_s:  # of {found.copies[0].nbytes} bytes")
    lines += [f"  {c.what.replace(' ', '_')}: {c.rate / 1e9:.4g}" for c in found.copies]
    lines.append(f"blocks:  # {shape}")
    for b in found.blocks:
        times = f"forward_ms: {b.forward * 1e3:.4g}, backward_ms: {b.backward * 1e3:.4g}"
        lines.append(f"  {b.kind}: {{{times}, forward_gflop: {b.flops / 1e9:.4g}}}")
    return "\n".join(lines) + "\n"


def versions(device: Device) -> str:
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    python = f"python {platform.python_version()}"
    return f"{device.name}; torch {torch.__version__}{cuda}, {python}, {os.cpu_count()} cores"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--only", default="", help="rows whose name contains it")
    parser.add_argument("--row", action="append", default=[], help="one more: NAME=override; override")
    parser.add_argument("--write", type=Path, help="a folder that gets gpu-<device>.md and .yaml")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    # what is asked for
    args, began = arguments(), time.perf_counter()
    asked = [*ALWAYS, *(TINY_LM if args.dry else LLAMA_1B), *args.overrides]
    job = compose(asked).job
    plan = plan_job(job)
    device = device_of(job, args.dry)
    rows = {name: overrides for name, overrides in ROWS.items() if args.only in name}
    for name, _, text in (r.partition("=") for r in args.row):
        rows[name] = tuple(map(str.strip, text.split(";")))

    # steps, row by row
    print(versions(device), flush=True)
    steps = []
    for case in cases(rows, device, asked, args):
        steps.append(row(case, job, device))
        cells = zip(HEAD, steps[-1], strict=True)
        print("  ".join(f"{name} {cell}" for name, cell in cells if cell), flush=True)

    # kernels, and the page
    found = kernels(job, plan, device, args.dry)
    assert isinstance(job.data, RandomTokens)
    shape = f"a micro batch of {plan.sizes.micro_batch} x {job.data.seq_len} tokens"
    took = time.perf_counter() - began
    said = f"{time.strftime('%Y-%m-%d')}, {versions(device)}; {' '.join(asked)}; {took:.0f} s."
    text = page(device, steps, found, shape, said)
    print(text)
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / f"gpu-{device.slug}.md").write_text(text)
        (args.write / f"gpu-{device.slug}.yaml").write_text(fragment(device, found, shape, said))


if __name__ == "__main__":
    main()
