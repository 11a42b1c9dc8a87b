"""Checks that ranks have traced the same code and begin with the same tensors."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import RunError
from launcher.parallel import byte_collectives
from launcher.parallel.deferred_init.fill import FullTensorOf, InitialTensors
from launcher.parallel.stages import StagePart

CAUSE = "depends on something that differs between processes, such as the order of a set of strings"
CURE = "sort the set, or start all ranks with the same PYTHONHASHSEED"


def check_agreement(parts: list[StagePart], full_tensor: FullTensorOf) -> None:
    """Compares the traced code and the initial tensors of all ranks. Every rank calls this.

    Raises ``RunError`` if weights would start from different values, or stages would not fit together.
    """
    # one digest per rank: nearly always they are equal
    code = parts[0].code
    made = full_tensor.texts() if isinstance(full_tensor, InitialTensors) else {}
    digest = hashlib.blake2b(repr((code, sorted(made.items()))).encode()).hexdigest()
    if len(set(_gathered(digest))) == 1:
        return

    # the first difference
    lines, *others = _gathered(code)
    for rank, theirs in enumerate(others, 1):
        for one, other in zip_longest(lines, theirs, fillvalue="nothing"):
            if one != other:
                text = f"the code between the named modules is '{one}' on rank 0 and '{other}' on rank {rank}"
                raise RunError(f"{text}: the forward {CAUSE}; {CURE}")
    _same_numbers(made, full_tensor)


def _same_numbers(made: dict[str, str], full_tensor: FullTensorOf) -> None:
    """Compares the values of tensors whose construction differs between ranks.

    The values may still be equal: a rank may have read from a cache what another one has computed.
    """
    every = _gathered(made)
    names = sorted({n for texts in every for n in texts})
    doubtful = [n for n in names if len({texts.get(n) for texts in every}) > 1]
    digests = {n: _digest(full_tensor, n) for n in doubtful if n in made}
    for rank, theirs in enumerate(_gathered(digests)):
        for name in doubtful:
            if theirs.get(name) != digests.get(name):
                text = (
                    f"the initial values of {name} on rank {rank} differ from those on rank {dist.get_rank()}"
                )
                raise RunError(f"{text}: the constructor {CAUSE}; {CURE}")


def _digest(full_tensor: FullTensorOf, name: str) -> str:
    numbers = full_tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.tobytes()).hexdigest()


def _gathered(mine: Any) -> list[Any]:
    """Returns the value of every rank, through JSON."""
    return [json.loads(body) for body in byte_collectives.all_gather(json.dumps(mine).encode())]
