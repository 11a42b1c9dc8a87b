"""Collectives of values and of named tensors, sent as typed JSON and plain bytes without pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import RunError
from launcher.parallel import byte_collectives
from launcher.parallel.trace.specs import spec
from launcher.runtime.cluster.typed_json import decode, encode

_HEAD = 8
"""Bytes of the number that contains the header's length."""
_Header = list[tuple[str, str, list[int]]]
"""The name, dtype and shape of each tensor."""


def all_gather(mine: object, kind: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of ``group``, encoded as ``kind`` by ``typed_json``. Every rank calls it."""
    return [decode(body, kind) for body in byte_collectives.all_gather(encode(mine, kind), group)]


def gather(mine: object, kind: Any) -> list[Any] | None:
    """Like ``all_gather``, but returns ``None`` on all ranks except rank 0."""
    every = byte_collectives.gather(encode(mine, kind))
    return None if every is None else [decode(body, kind) for body in every]


def broadcast(value: object, kind: Any) -> Any:
    """Returns rank 0's ``value`` on every rank; the others may pass anything. Every rank calls it."""
    return decode(byte_collectives.broadcast(encode(value, kind) if dist.get_rank() == 0 else b""), kind)


def send(value: object, kind: Any, rank: int) -> None:
    """Sends ``value`` to ``rank``, which calls ``recv``."""
    byte_collectives.send(encode(value, kind), rank)


def recv(kind: Any, rank: int) -> Any:
    """Receives the value that ``rank`` passes to ``send``."""
    return decode(byte_collectives.recv(rank), kind)


def gather_tensors(mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]] | None:
    """Returns on rank 0 the tensors of each rank, on the CPU; on the others ``None``. Every rank calls it."""
    every = byte_collectives.gather(_packed(mine))
    return None if every is None else [_unpacked(body) for body in every]


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    """A header, followed by the bytes of each tensor."""
    specs = {name: spec(t) for name, t in tensors.items()}
    header = encode([(name, s.dtype, [*s.shape]) for name, s in specs.items()], _Header)
    flat = (t.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in tensors.values())
    numbers = (t.view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat)
    return b"".join([len(header).to_bytes(_HEAD, "little"), header, *numbers])


def _unpacked(body: bytes) -> dict[str, Tensor]:
    """The tensors that ``_packed`` wrote. Raises ``RunError`` for anything else."""
    at = _HEAD + int.from_bytes(body[:_HEAD], "little")
    header: _Header = decode(body[_HEAD:at], _Header)
    tensors = {}
    for name, dtype_name, shape in header:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise RunError(f"no message between ranks: {name} of dtype {dtype_name!r:.80} and shape {shape}")
        t = torch.empty(shape, dtype=dtype)
        raw = body[at : at + t.nbytes]
        if len(raw) != t.nbytes:
            raise RunError(f"no message between ranks: {name} has {len(raw)} bytes of {t.nbytes}")
        if raw:
            t.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        tensors[name] = t
        at += t.nbytes
    return tensors
