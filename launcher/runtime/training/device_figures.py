"""Figures of the device after a step: its memory, and how much of its speed was used."""

from __future__ import annotations

from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage

import torch

from launcher.plan.plan import Plan
from launcher.runtime import device as devices
from launcher.runtime.training.device_peaks import peak_flops


@dataclass(frozen=True)
class DeviceFigures:
    """``flops``: a rank's share of those of a step. ``peak``: the most FLOP/s of its device, if known."""

    device: torch.device
    flops: float
    peak: float | None

    def row(self, seconds: float) -> dict[str, float]:
        """The figures of a step that took ``seconds``.

        Memory is the peak so far: on an accelerator what torch's allocator handed out and what it reserved on
        the device, elsewhere the resident memory of the process.
        """
        # memory
        if devices.is_accelerator(self.device):
            allocated, reserved = devices.peak_memory(self.device)
            out = {"memory_mb": allocated / 2**20, "memory_reserved_mb": reserved / 2**20}
        else:
            out = {"memory_mb": getrusage(RUSAGE_SELF).ru_maxrss / 1024}

        # speed, and its share of the peak
        if self.peak is not None:
            rate = self.flops / seconds
            out |= {"tflops": rate / 1e12, "mfu": rate / self.peak}
        return out


def figures(plan: Plan, device: torch.device) -> DeviceFigures:
    """The figures of this rank's ``device``."""
    tf32 = torch.get_float32_matmul_precision() != "highest"
    peak = peak_flops(devices.name(device), plan.dtypes.compute, tf32)
    return DeviceFigures(device, plan.estimate.flops / plan.sizes.grid.size, peak)
