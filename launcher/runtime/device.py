"""The devices of this machine: the CPU, and the accelerator that torch supports, whatever its kind.

All differences between CUDA, XPU, Ascend's NPU and others are handled here, through the functions that their
modules (``torch.cuda``, ``torch.xpu``, ``torch.npu``) have in common. Functions that say so initialize no
device: ranks can be forked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

CPU = "cpu"
GLOO = "gloo"

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The variable that restricts a process to some of a machine's devices."""

JOINED = {
    "cuda": "PYTORCH_ALLOC_CONF=expandable_segments:True",
    "npu": "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
}
"""The variable that lets the allocator of a kind of device join free pieces of memory."""


def accelerator() -> str | None:
    """Returns the kind of accelerator that torch was built for or has loaded; this machine may not have one.

    Initializes nothing.
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def count(kind: str) -> int:
    """Returns the number of devices of a ``kind`` here; 0 if torch does not support the kind.

    Initializes nothing.
    """
    if kind != accelerator():
        return 0
    return int(_module(kind).device_count())


def is_accelerator(device: torch.device | str) -> bool:
    """Returns true unless ``device`` is the CPU: it then has its own memory and collectives."""
    return torch.device(device).type != CPU


def own_backend(kind: str) -> str | None:
    """Returns the collective backend of a kind of device in torch's table, such as ``nccl`` or ``gloo``."""
    backend = dist.Backend.default_device_backend_map.get(kind)
    return None if backend is None else str(backend)


def takes(backend: str, kind: str) -> bool:
    """Returns true if a ``backend`` of torch supports tensors on a kind of device."""
    return kind in dist.Backend.backend_capability.get(backend, ())


def backends(kind: str) -> str:
    """Returns the backends of a process group of ranks on ``kind``; gloo is used for tensors in host memory.

    >>> backends("cpu")
    'gloo'
    """
    own = own_backend(kind)
    return GLOO if kind == CPU or own is None else f"{CPU}:{GLOO},{kind}:{own}"


def use(device: torch.device) -> None:
    """Makes an accelerator the device of this process; otherwise a DeviceMesh would choose one itself."""
    module = _module(device.type)
    module.set_device(device)
    module.init()


def bind(device: torch.device) -> None:
    """Keeps the process group bound to an accelerator only if its communicators can be split.

    A DeviceMesh creates its groups by splitting a bound group, which fails if the backend cannot split.
    """
    group: Any = dist.group.WORLD
    if not group._get_backend(device).supports_splitting:
        group.bound_device_id = None


def synchronize(device: torch.device) -> None:
    """Waits until all work that was launched on ``device`` is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


# memory
def free_memory(kind: str, ranks: int) -> list[int]:
    """Returns the free bytes of each of the first ``ranks`` devices. Initializes them."""
    return [int(_module(kind).mem_get_info(i)[0]) for i in range(ranks)]


def total_memory(device: torch.device) -> int:
    """Returns the bytes of an accelerator's memory."""
    return int(_module(device.type).get_device_properties(device).total_memory)


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Returns the peak bytes that torch's allocator handed out, and that it reserved on an accelerator."""
    module = _module(device.type)
    return int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device))


def memory_in_use(device: torch.device) -> tuple[int, int, int, int]:
    """Returns an accelerator's bytes at this process's peak: total, free, in tensors, else reserved by torch.

    Assumes that other processes used as much then as they do now.
    """
    module = _module(device.type)
    free, total = module.mem_get_info(device)
    others = max(0, total - free - module.memory_reserved(device))
    tensors, reserved = peak_memory(device)
    return int(total), max(0, int(total - others) - reserved), tensors, max(0, reserved - tensors)


def memory_history(device: torch.device) -> Any:
    """Returns the module that records allocations, or ``None``.

    It has ``_record_memory_history`` and ``_dump_snapshot``.
    """
    module = getattr(_module(device.type), "memory", None) if is_accelerator(device) else None
    return module if hasattr(module, "_record_memory_history") else None


def profiled(device: torch.device) -> list[ProfilerActivity]:
    """Returns what torch's profiler can record of a process: its CPU first, then kernels of ``device``."""
    kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU, "mtia": ProfilerActivity.MTIA}
    kind = kinds.get(device.type, ProfilerActivity.PrivateUse1)
    activities = [ProfilerActivity.CPU, *([kind] if is_accelerator(device) else [])]
    return [activity for activity in activities if activity in torch.profiler.supported_activities()]


def name(device: torch.device) -> str:
    """Returns the model name of an accelerator, from its driver; for the CPU ``cpu``."""
    return str(_module(device.type).get_device_name(device)) if is_accelerator(device) else device.type


# random numbers
def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the random states of a process that uses ``device``, by kind of device."""
    states = {CPU: torch.get_rng_state()}
    if is_accelerator(device):
        states[device.type] = _module(device.type).get_rng_state(device)
    return states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores random states; ignores those of kinds that this process does not use."""
    if CPU in states:
        torch.set_rng_state(states[CPU])
    if is_accelerator(device) and device.type in states:
        _module(device.type).set_rng_state(states[device.type], device)


def forked_streams(device: torch.device) -> AbstractContextManager[None]:
    """Restores random states after the block, including that of ``device``."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng([device], device_type=device.type)


# copies between a device and the host
def pinned(t: Tensor) -> Tensor:
    """Returns the CPU tensor ``t`` in pinned memory, from which an accelerator can copy asynchronously."""
    return t.pin_memory()


def host_copy(t: Tensor) -> Tensor:
    """Returns host memory for a copy of ``t``; pinned if ``t`` is on an accelerator."""
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=is_accelerator(t.device))


def copies_done(device: torch.device) -> torch.Event:
    """Returns an event that ``device`` reaches when it has finished all copies issued so far."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _module(kind: str) -> Any:
    """Returns the torch module of a kind of device, such as ``torch.cuda``."""
    return torch.get_device_module(kind)
