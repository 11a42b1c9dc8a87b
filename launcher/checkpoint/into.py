"""Tensors put into a live ``torch.nn.Module``, without importing torch: whoever has such a module has it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from launcher.checkpoint.blob import Blob, described
from launcher.plan.facts import TensorSpec


def load_into(net: Any, tensors: Mapping[str, Blob], *, strict: bool) -> None:
    """Everything is checked first. Raises ``ValueError`` with each tensor that does not fit, with ``strict`` each name.

    ``net`` is on the CPU; names that it does not know are left out unless ``strict``.
    """
    state = net.state_dict()
    found = [f"only in the files: {n}" for n in tensors if strict and n not in state]
    found += [f"only in the net: {n}" for n in state if strict and n not in tensors]
    common = [n for n in tensors if n in state]
    if not common:
        found.append("no tensor of the files is in the net")
    for name in common:
        spec, have = tensors[name].spec, _spec(state[name])
        if spec != have:
            found.append(f"{name}: the files have {described(spec)}, the net {described(have)}")
        elif str(state[name].device) != "cpu":
            found.append(f"{name}: on {state[name].device}, where this cannot write; load before moving the net there")
    if found:
        raise ValueError("the checkpoint does not fit the net:\n" + "\n".join(f"  {f}" for f in found))
    net.load_state_dict({name: _copy(state[name], tensors[name]) for name in common}, strict=False)


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _copy(like: Any, blob: Blob) -> Any:
    """A new tensor with the bytes of ``blob``."""
    new = like.new_empty(blob.shape)
    source = np.frombuffer(blob.data, np.uint8) if blob.data.nbytes else np.empty(0, np.uint8)
    ctypes.memmove(new.data_ptr(), source.ctypes.data, source.nbytes)  # new_empty is contiguous
    return new
