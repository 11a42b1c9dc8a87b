"""The kernels of one step: the slowest by name, and sums of products, attention and the rest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from launcher.runtime import device as launcher_device
from launcher.runtime.training.profiler import KernelTimes, kernel_times, shortened

# kernel names of NVIDIA's libraries and of inductor, and torch's operators on a CPU
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"sdpa|flash|fmha|attention|convert_dq|dot_do_o", re.IGNORECASE)),
    ("products", re.compile(r"nvjet|gemm|cutlass|cublas|aten::(mm|bmm|addmm)$|mkldnn_linear", re.IGNORECASE)),
)
MOST = 28


def group(name: str) -> str:
    """Return the group that a kernel belongs to.

    >>> group("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"), group("triton_poi_fused_add_8")
    ('products', 'rest')
    >>> group("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26"), group("aten::mm")
    ('attention', 'products')
    """
    return next((word for word, pattern in GROUPS if pattern.search(name)), "rest")


def profiled(one: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return the kernels of one more step.

    Only the device is profiled, because events of the CPU would slow the step. If the profiler sees no
    kernels of the device, it profiles the CPU's operators in another step.
    """
    kinds = launcher_device.profiled(device)
    times = _profiled(one, device, kinds[-1:])
    return summary(times if times.rows else _profiled(one, device, kinds[:1]))


def _profiled(one: Callable[[], object], device: torch.device, kinds: Sequence[Any]) -> KernelTimes:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        with torch.profiler.profile(activities=kinds) as trace:
            one()
            launcher_device.synchronize(device)
    return kernel_times(trace)


def summary(times: KernelTimes) -> dict[str, Any]:
    """Return JSON values: the milliseconds of each group, and those of the slowest kernels."""
    groups = dict.fromkeys(("products", "attention", "rest"), 0.0)
    for row in times.rows:
        groups[group(row.name)] += row.seconds * 1e3
    return {
        "kernels_ms": round(times.seconds * 1e3, 2),
        "kernels_of": times.on,
        "groups_ms": {name: round(ms, 2) for name, ms in groups.items()},
        "kernels": [[row.name[:160], row.calls, round(row.seconds * 1e3, 2)] for row in times.rows[:MOST]],
    }


def lines(values: Mapping[str, Any]) -> list[str]:
    """Format the values of ``told`` as a table."""
    groups = ", ".join(f"{name} {ms:.1f}" for name, ms in values["groups_ms"].items())
    out = [f"{values['kernels_ms']:.1f} ms of kernels ({values['kernels_of']}): {groups}"]
    out += [f"{ms:9.2f} {calls:6d}  {shortened(name)}" for name, calls, ms in values["kernels"]]
    return out
