"""Computes the figures of a step's speed: tokens per second, MFU, memory and slow ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from statistics import median

import torch

from launcher.plan.plan import Plan
from launcher.runtime import device as devices
from launcher.runtime.torch_private.work_wait import seconds_waited

Peaks = Mapping[str, float]

# TFLOP/s, dense (without sparsity). Half precision: tensor cores with sums in fp32. float32 and float64: what
# torch uses by default, the vector units and, for float64, the tensor cores if there are any; tf32: if
# torch.set_float32_matmul_precision allows it. The numbers are from NVIDIA's data sheets for the named model
# (SXM if none is named); sparse numbers are halved if only these are given.
_HOPPER_SXM = {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 66.9}
PEAKS: tuple[tuple[str, Peaks], ...] = (
    # NVIDIA Blackwell datasheet (HGX B200, a GPU)
    ("B200", {"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1100.0, "float32": 75.0, "float64": 37.0}),
    # NVIDIA H200 Tensor Core GPU datasheet (SXM; compute as H100)
    ("H200", _HOPPER_SXM),
    # NVIDIA H100 Tensor Core GPU datasheet, columns NVL and PCIe
    ("H100 NVL", {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60.0, "float64": 60.0}),
    ("H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "tf32": 378.0, "float32": 51.0, "float64": 51.0}),
    # NVIDIA H100 Tensor Core GPU Architecture (white paper), table of SXM5
    ("H100", _HOPPER_SXM),
    # NVIDIA A100 Tensor Core GPU datasheet; the same for PCIe and SXM, 40 and 80 GB
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5, "float64": 19.5}),
    # NVIDIA L40S datasheet
    ("L40S", {"bfloat16": 362.0, "float16": 362.0, "tf32": 183.0, "float32": 91.6}),
    # NVIDIA L4 Tensor Core GPU datasheet (sparse numbers halved)
    ("L4", {"bfloat16": 121.0, "float16": 121.0, "tf32": 60.0, "float32": 30.3}),
    # NVIDIA A10 Tensor Core GPU datasheet
    ("A10", {"bfloat16": 125.0, "float16": 125.0, "tf32": 62.5, "float32": 31.2}),
    # NVIDIA V100 Tensor Core GPU datasheet (SXM2, PCIe); it has no bf16 in tensor cores
    ("V100-SXM", {"float16": 125.0, "float32": 15.7, "float64": 7.8}),
    ("V100-PCIE", {"float16": 112.0, "float32": 14.0, "float64": 7.0}),
    # NVIDIA T4 Tensor Core GPU datasheet
    ("T4", {"float16": 65.0, "float32": 8.1}),
)
"""Peaks by a part of the device name that torch reports; the first match counts."""


def peak_flops(device: str, dtype: str, tf32: bool = False) -> float | None:
    """Returns the FLOP/s of a ``device`` in ``dtype``; ``None`` if the table has no number.

    ``tf32``: float32 matrix products use TF32.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops("NVIDIA H100 PCIe", "float16")
    (989400000000000.0, 756000000000000.0)
    >>> peak_flops("NVIDIA A100-SXM4-80GB", "float32", tf32=True)
    156000000000000.0
    >>> peak_flops("Tesla T4", "bfloat16"), peak_flops("cpu", "float32")
    (None, None)
    """
    words = device.replace("-", " ").split()
    if "MIG" in words:  # a slice of a device
        return None
    for name, peaks in PEAKS:
        if _within(name.replace("-", " ").split(), words):
            tera = peaks.get("tf32" if tf32 and dtype == "float32" else dtype)
            return None if tera is None else tera * 1e12
    return None


def _within(name: list[str], words: list[str]) -> bool:
    """Returns true if the words of ``name`` appear in a row; a number may follow the last one (SXM2).

    >>> _within(["V100", "SXM"], ["Tesla", "V100", "SXM2", "16GB"]), _within(["L4"], ["NVIDIA", "L40S"])
    (True, False)
    """
    for start in range(len(words) - len(name) + 1):
        here = words[start : start + len(name)]
        if here[:-1] == name[:-1] and (here[-1] == name[-1] or _numbered(name[-1], here[-1])):
            return True
    return False


def _numbered(name: str, word: str) -> bool:
    """Returns true if ``word`` is ``name`` and a number (SXM4 for SXM), unless ``name`` ends in a digit."""
    return word.startswith(name) and word[len(name) :].isdecimal() and not name[-1].isdecimal()


def units_per_second(unit: str, units: int, seconds: float) -> dict[str, float]:
    """Returns the figure ``tokens_per_s`` or ``samples_per_s`` of a step that took ``seconds``.

    ``unit``: tokens or samples; ``units``: how many of them all ranks together train on in a step.

    >>> units_per_second("tokens", 4096, 0.5)
    {'tokens_per_s': 8192.0}
    """
    return {f"{unit}_per_s": units / seconds}


@dataclass(frozen=True)
class DeviceFigures:
    """Computes memory, tflops and mfu of a step.

    ``flops``: a rank's share of a step's FLOPs. ``peak``: the most FLOP/s of its device, if known.
    """

    device: torch.device
    flops: float
    peak: float | None

    def row(self, seconds: float) -> dict[str, float]:
        """Returns the figures of a step that took ``seconds``.

        Memory is the peak so far: on an accelerator what torch's allocator handed out and what it reserved on
        the device, elsewhere the resident memory of the process.
        """
        # memory
        if devices.is_accelerator(self.device):
            allocated, reserved = devices.peak_memory(self.device)
            out = {"memory_mb": allocated / 2**20, "memory_reserved_mb": reserved / 2**20}
        else:
            out = {"memory_mb": getrusage(RUSAGE_SELF).ru_maxrss / 1024}

        # speed, and its fraction of the peak
        if self.peak is not None:
            rate = self.flops / seconds
            out |= {"tflops": rate / 1e12, "mfu": rate / self.peak}
        return out


def device_figures(plan: Plan, device: torch.device) -> DeviceFigures:
    """Returns the figures of this rank's ``device``."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    peak = peak_flops(devices.name(device), plan.dtypes.compute, tf32)
    return DeviceFigures(device, plan.estimate.flops / plan.sizes.grid.size, peak)


class RankTimes:
    """Times the work of this rank without its waits; ranks exchange times in a collective that runs anyway.

    In a synchronous step all ranks take the same wall-clock time: the slow one is the one that waits least. A
    step is measured from its start until its gradients have arrived.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._began: float | None = None
        self._seconds = 0.0
        self._steps = 0
        seconds_waited()

    def begin(self) -> None:
        """Marks the start of a step."""
        self._began = time.perf_counter() - seconds_waited()

    def arrived(self) -> None:
        """Marks the arrival of the step's gradients."""
        if self._began is not None:
            self._seconds += time.perf_counter() - seconds_waited() - self._began
            self._steps += 1
            self._began = None

    def share(self) -> torch.Tensor:
        """Returns this rank's milliseconds per step since the last call, in a (ranks,) float64 tensor.

        They are at the rank's index; the other entries are 0, so the sum over all ranks has the times of all.
        """
        out = torch.zeros(self._size, dtype=torch.float64)
        if self._steps:
            out[self._rank] = 1e3 * self._seconds / self._steps
        self._seconds, self._steps = 0.0, 0
        return out


def rank_figures(each: Sequence[float]) -> dict[str, float]:
    """Returns the median and the worst of the ranks' milliseconds.

    >>> rank_figures([30.0, 90.0, 31.0])
    {'step_ms_median': 31.0, 'step_ms_worst': 90.0, 'worst_rank': 1}
    """
    worst = max(range(len(each)), key=each.__getitem__)
    return {"step_ms_median": median(each), "step_ms_worst": each[worst], "worst_rank": worst}
