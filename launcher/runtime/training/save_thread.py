"""The thread that writes a checkpoint while training continues."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime import device as devices


class Saver:
    """Runs one write at a time.

    Only the thread uses ``group``, so its collectives never mix with those of training.
    """

    def __init__(self) -> None:
        """Creates a process group, so every rank constructs one at the same point of its work."""
        group = dist.new_group(backend="gloo")
        assert group is not None
        self.group: dist.ProcessGroup = group
        self._host: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def host(self, name: str, t: Tensor) -> Tensor:
        """Returns a copy of ``t`` in host memory.

        After ``wait``, the memory is reused for the next copy of this name. A device copies asynchronously to
        pinned memory, in the order of its other work: later work of the caller cannot change the copy, and
        only the thread waits for it, before it writes.
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
        """Starts the thread, which runs ``write`` once all copies are finished."""
        assert self._thread is None
        copied = [devices.copies_done(device) for device in self._devices]
        self._devices.clear()
        self._thread = Thread(target=self._run, args=(write, copied), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def check(self) -> None:
        """Raises the error of a failed write, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until the write has ended. Raises its error."""
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
