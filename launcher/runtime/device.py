"""The devices of this machine: the CPU, and the accelerator that torch knows, whatever it is called.

All that differs between CUDA, XPU, Ascend's NPU and others is asked here, by the names that their modules
(``torch.cuda``, ``torch.xpu``, ``torch.npu``) have in common. Functions that say so initialise no device:
ranks can be forked afterwards.
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
"""The variable by which a process is given some of a machine's devices."""

JOINED = {
    "cuda": "PYTORCH_ALLOC_CONF=expandable_segments:True",
    "npu": "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
}
"""The variable by which the allocator of a kind of device joins free pieces of memory."""


def accelerator() -> str | None:
    """The kind of accelerator that torch has been built for or has loaded, which this machine need not have.

    Initialises nothing.
    """
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def count(kind: str) -> int:
    """Devices of a ``kind`` that torch sees here, 0 where it knows none of that name. Initialises nothing."""
    if kind != accelerator():
        return 0
    return int(_module(kind).device_count())


def is_accelerator(device: torch.device | str) -> bool:
    """Whether ``device`` has memory and collectives of its own."""
    return torch.device(device).type != CPU


def own_backend(kind: str) -> str | None:
    """The collectives of a kind of device, by torch's own table: ``nccl``, ``xccl``, ``hccl``, ``gloo``."""
    found = dist.Backend.default_device_backend_map.get(kind)
    return None if found is None else str(found)


def takes(backend: str, kind: str) -> bool:
    """Whether a ``backend`` of torch carries tensors of a kind of device."""
    return kind in dist.Backend.backend_capability.get(backend, ())


def backends(kind: str) -> str:
    """What a process group of ranks on ``kind`` is made with; gloo carries what lives in host memory.

    >>> backends("cpu")
    'gloo'
    """
    own = own_backend(kind)
    return GLOO if kind == CPU or own is None else f"{CPU}:{GLOO},{kind}:{own}"


def use(device: torch.device) -> None:
    """Make an accelerator the device of this process; else a DeviceMesh would choose one by itself."""
    module = _module(device.type)
    module.set_device(device)
    module.init()


def bind(device: torch.device) -> None:
    """Keep the process group bound to an accelerator only where its collectives can be split.

    A DeviceMesh makes its groups by splitting one that is bound, and fails where no such collectives are.
    """
    group: Any = dist.group.WORLD
    if not group._get_backend(device).supports_splitting:
        group.bound_device_id = None


def synchronize(device: torch.device) -> None:
    """Wait until all that was launched on ``device`` is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


# memory
def free_memory(kind: str, ranks: int) -> list[int]:
    """Bytes that are free on each of the first devices. Initialises them."""
    return [int(_module(kind).mem_get_info(i)[0]) for i in range(ranks)]


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator's memory."""
    return int(_module(device.type).get_device_properties(device).total_memory)


def peak_memory(device: torch.device) -> tuple[int, int]:
    """The most bytes so far that torch's allocator gave, and that it took from an accelerator."""
    module = _module(device.type)
    return int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device))


def memory_in_use(device: torch.device) -> tuple[int, int, int, int]:
    """An accelerator's bytes at this process's fullest moment: all, free, its tensors, its allocator's rest.

    What others have is taken to be the same then as now.
    """
    module = _module(device.type)
    free, total = module.mem_get_info(device)
    others = max(0, total - free - module.memory_reserved(device))
    tensors, reserved = peak_memory(device)
    return int(total), max(0, int(total - others) - reserved), tensors, max(0, reserved - tensors)


def memory_history(device: torch.device) -> Any:
    """What records allocations, with ``_record_memory_history`` and ``_dump_snapshot``; ``None``: nothing."""
    found = getattr(_module(device.type), "memory", None) if is_accelerator(device) else None
    return found if hasattr(found, "_record_memory_history") else None


def profiled(device: torch.device) -> list[ProfilerActivity]:
    """What torch's profiler can record of a process on ``device``: its CPU first, then its kernels."""
    kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU, "mtia": ProfilerActivity.MTIA}
    kind = kinds.get(device.type, ProfilerActivity.PrivateUse1)
    wanted = [ProfilerActivity.CPU, *([kind] if is_accelerator(device) else [])]
    return [activity for activity in wanted if activity in torch.profiler.supported_activities()]


def name(device: torch.device) -> str:
    """The model of an accelerator, as its driver calls it; ``cpu``."""
    return str(_module(device.type).get_device_name(device)) if is_accelerator(device) else device.type


# random numbers
def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The random streams of a process that works on ``device``, by the kind of device."""
    states = {CPU: torch.get_rng_state()}
    if is_accelerator(device):
        states[device.type] = _module(device.type).get_rng_state(device)
    return states


def set_rng_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put streams where they were; those of a kind that this process does not work on are left out."""
    if CPU in states:
        torch.set_rng_state(states[CPU])
    if is_accelerator(device) and device.type in states:
        _module(device.type).set_rng_state(states[device.type], device)


def forked_streams(device: torch.device) -> AbstractContextManager[None]:
    """Random streams are where they were after the block, those of ``device`` too."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng([device], device_type=device.type)


# copies between a device and the host
def pinned(t: Tensor) -> Tensor:
    """``t``, which is on the CPU, in memory from which an accelerator copies while the host goes on."""
    return t.pin_memory()


def host_copy(t: Tensor) -> Tensor:
    """Memory of the host for a copy of ``t``: pinned where ``t`` is on an accelerator."""
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=is_accelerator(t.device))


def copies_done(device: torch.device) -> torch.Event:
    """What ``device`` comes to when it has made all copies that were asked of it until now."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _module(kind: str) -> Any:
    """``torch.cuda`` and its like."""
    return torch.get_device_module(kind)
