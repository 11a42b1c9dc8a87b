"""Collectives of bytes, whose length may differ between ranks.

They replace torch's object collectives, which unpickle what they receive: anyone who reaches the port of a
rank could run code in it. Here the caller parses the bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(body: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Returns the ``body`` of every rank of ``group``; all of its ranks call this."""
    lengths, most = _lengths(body, group)
    if not most:
        return [b""] * len(lengths)
    mine = _padded(body, most, group)
    every = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(every, mine, group)
    return _trimmed(every, lengths)


def gather(body: bytes) -> list[bytes] | None:
    """Returns the ``body`` of every rank on rank 0, and ``None`` on the others; all ranks call this."""
    lengths, most = _lengths(body, None)
    first = dist.get_rank() == 0
    if not most:
        return [b""] * len(lengths) if first else None
    mine = _padded(body, most, None)
    every = [torch.empty_like(mine) for _ in lengths] if first else None
    dist.gather(mine, every)
    return None if every is None else _trimmed(every, lengths)


def broadcast(body: bytes) -> bytes:
    """Returns the ``body`` of rank 0; all ranks call this."""
    length = torch.tensor([len(body)], device=_device(None))
    dist.broadcast(length, 0)
    if not int(length):
        return b""
    sent = _padded(body if dist.get_rank() == 0 else b"", int(length), None)
    dist.broadcast(sent, 0)
    return _bytes(sent)


def send(body: bytes, rank: int) -> None:
    """Sends ``body`` to one ``rank``, which calls ``recv``."""
    dist.send(torch.tensor([len(body)], device=_device(None)), rank)
    dist.send(_padded(body, len(body), None), rank)


def recv(rank: int) -> bytes:
    """Returns the bytes that ``rank`` sends with ``send``."""
    length = torch.tensor([0], device=_device(None))
    dist.recv(length, rank)
    body = _padded(b"", int(length), None)
    dist.recv(body, rank)
    return _bytes(body)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device of a collective's tensors: the CPU, if the group has a backend for it."""
    backends = dist.get_backend_config(group)
    if "cpu:" in backends:
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _lengths(body: bytes, group: dist.ProcessGroup | None) -> tuple[list[int], int]:
    """Returns the length of every rank's bytes, and the largest."""
    mine = torch.tensor([len(body)], device=_device(group))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group)
    lengths = torch.cat(every).tolist()
    return lengths, max(lengths)


def _padded(body: bytes, length: int, group: dist.ProcessGroup | None) -> Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    if body:
        padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return padded.to(_device(group))


def _trimmed(every: list[Tensor], lengths: list[int]) -> list[bytes]:
    return [_bytes(t[:length]) for t, length in zip(every, lengths, strict=True)]


def _bytes(t: Tensor) -> bytes:
    return t.cpu().numpy().tobytes()
