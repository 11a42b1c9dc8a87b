"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime import device as devices


class Saver:
    """One write at a time.

    ``group`` is for the thread alone: its collectives never mix with those of training.
    """

    def __init__(self) -> None:
        """Every rank makes one at the same point of its work."""
        group = dist.new_group(backend="gloo")
        assert group is not None
        self.group: dist.ProcessGroup = group
        self._host: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def host(self, name: str, t: Tensor) -> Tensor:
        """A copy of ``t`` in host memory, reused for the next one of this name: ``wait`` before.

        From a device it is made to pinned memory, in turn with what the device has to do before and after:
        what the caller enqueues later cannot change it, and nobody waits but the thread, before it writes.
        """
        assert self._thread is None
        away = devices.is_accelerator(t.device)
        if away:
            self._devices.add(t.device)
        kept = self._host.get(name)
        if kept is None or kept.shape != t.shape or kept.dtype != t.dtype or kept.is_pinned() != away:
            kept = self._host[name] = devices.host_copy(t)
        return kept.copy_(t.detach(), non_blocking=away)

    def start(self, write: Callable[[], None]) -> None:
        """Have the thread do ``write``, once all copies are made."""
        assert self._thread is None
        copied = [devices.copies_done(device) for device in self._devices]
        self._devices.clear()
        self._thread = Thread(target=self._run, args=(write, copied), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises the error of the write."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None], copied: list[torch.Event]) -> None:
        try:
            for event in copied:
                event.synchronize()
            write()
        except BaseException as error:  # the main thread raises it
            self._error = error
