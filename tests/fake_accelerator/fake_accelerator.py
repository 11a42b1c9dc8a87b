"""``torch.fake``: the Python module of the fake accelerator, with the names that ``torch.cuda`` and ``torch.xpu`` have.

It is copied into the folder that ``build.py`` makes, and loaded by torch there; the repository does not import it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME, COLLECTIVES = "fake", "fakeccl"


def autoload() -> None:
    """torch calls this after its import. It does not initialize a device."""
    global _C
    if COLLECTIVES in dist.Backend.backend_list or not int(os.environ.get("FAKE_DEVICES", "0")):
        return
    import _fake_accelerator as _C

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend(COLLECTIVES, _collectives, devices=[NAME])


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _C.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


def _index(device: Any = None) -> int:
    if device is None:
        return _C.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return _C.current_device() if index is None else index


# devices
def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Any) -> None:
    _C.set_device(_index(device))


@contextmanager
def device(device: Any) -> Iterator[None]:
    before = _exchange_device(_index(device))
    try:
        yield
    finally:
        _C.set_device(before)


def _exchange_device(index: int) -> int:
    before = _C.current_device()
    if index >= 0:
        _C.set_device(index)
    return before


_maybe_exchange_device = _exchange_device


def init() -> None:
    _C.init()


_lazy_init = init


def is_initialized() -> bool:
    return _C.is_initialized()


def _is_in_bad_fork() -> bool:
    return _C.is_in_bad_fork()


def get_device_name(device: Any = None) -> str:
    return "Fake accelerator"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), total_memory=mem_get_info(device)[1])


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# streams and events: a device has one stream, and each operation is done at once
def synchronize(device: Any = None) -> None:
    init()


def Stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
    return torch.Stream(device=torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device=torch.device(NAME, current_device()), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Any = None) -> torch.Stream:
    return Stream(device)


default_stream = current_stream


def stream(stream: torch.Stream | None) -> Any:
    return nullcontext(stream)


def set_stream(stream: torch.Stream) -> None:
    set_device(stream.device)


# random numbers
def _generator(device: Any = None) -> torch.Generator:
    return _C.default_generator(_index(device))


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for i, state in enumerate(states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for i in range(device_count()):
        _generator(i).manual_seed(seed)


def seed() -> int:
    return _generator().seed()


def initial_seed() -> int:
    return _generator().initial_seed()


# memory
def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Initializes the device, as a real driver does."""
    init()
    return torch._C._accelerator_getMemoryInfo(_index(device))


def empty_cache() -> None:
    """Nothing is cached."""
