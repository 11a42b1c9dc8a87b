"""Makes torch parameters of the tensors of files, and loads them into a ``torch.nn.Module``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from launcher.checkpoint.foreign.names import kind_of
from launcher.checkpoint.tensorfile.safetensors import described
from launcher.plan.values.tensor_spec import TensorSpec


def parameter(spec: TensorSpec, chunks: Iterable[bytes | memoryview]) -> Any:
    """Returns a ``torch.nn.Parameter`` with its own memory.

    It requires a gradient only if it is floating point or complex.
    """
    torch = import_module("torch")  # imported only here: the rest of this folder works without torch
    data = bytearray()
    for chunk in chunks:
        data += chunk

    dtype = getattr(torch, spec.dtype)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    trained = dtype.is_floating_point or dtype.is_complex
    return torch.nn.Parameter(flat.reshape(spec.shape), requires_grad=trained)


def load_into(net: Any, tensors: Mapping[str, Any], *, strict: bool) -> None:
    """Copies ``tensors`` into the tensors of ``net`` that have their names.

    If ``strict``, names and dtypes must be equal on both sides. Only counters and optimizer states, which a
    training saves too, may be missing in the net. If not ``strict``, names in the files may begin with a
    prefix and a dot that the net's names lack, such as ``model.``. Values are then cast to the net's width,
    but never between floating point and integers.

    Everything is checked before anything is copied. Raises ``ValueError`` with all mismatches.
    """
    state = net.state_dict()
    wrong = []
    if strict:
        extra = [name for name in tensors if name not in state and not _of_training(name, tensors)]
        wrong += [f"only in the files: {name}" for name in extra]
        wrong += [f"only in the net: {name}" for name in state if name not in tensors]

    # which tensor of the files each tensor of the net takes
    names = {name: name for name in state if name in tensors}
    if not strict:
        missing = [name for name in state if name not in names]
        taken, doubtful = _by_suffix(missing, [name for name in tensors if name not in names])
        names |= taken
        wrong += doubtful
    if not names and not wrong:
        wrong.append("no tensor of the files is in the net")

    misfits = (_misfit(theirs, tensors[theirs], state[name], strict) for name, theirs in names.items())
    wrong += [text for text in misfits if text]
    if wrong:
        raise ValueError("the checkpoint does not fit the net:\n" + "\n".join(f"  {text}" for text in wrong))
    net.load_state_dict({name: tensors[theirs].detach() for name, theirs in names.items()}, strict=False)


def _of_training(name: str, tensors: Mapping[str, Any]) -> bool:
    """Returns true if ``name`` is a counter, or an optimizer state of a parameter in the files."""
    ours = name.split(".", 2)
    if ours[0] == "optim" and ours[-1] in tensors:
        return True
    return tensors[name].numel() == 1 or kind_of(name, tensors) == "optim"


def _by_suffix(missing: list[str], others: list[str]) -> tuple[dict[str, str], list[str]]:
    """Matches names of the net that are ``missing`` in the files with names in ``others`` that end in them.

    If exactly one prefix fits all of them, it is used. Optimizer states are never matched. Returns the
    matches, and a message for each name that is ambiguous.
    """
    weights = [n for n in others if kind_of(n, dict.fromkeys(others)) == "param"]
    prefixes_of = {n: [w.removesuffix(n) for w in weights if w.endswith(f".{n}")] for n in missing}
    prefixes_of = {n: prefixes for n, prefixes in prefixes_of.items() if prefixes}
    counts = Counter(prefix for prefixes in prefixes_of.values() for prefix in prefixes)
    common = [prefix for prefix, count in counts.items() if count == len(prefixes_of)]
    if len(common) == 1:
        return {n: common[0] + n for n in prefixes_of}, []
    doubtful = [
        f"{n}: ambiguous: {' and '.join(p + n for p in ps)}" for n, ps in prefixes_of.items() if len(ps) > 1
    ]
    return {n: ps[0] + n for n, ps in prefixes_of.items() if len(ps) == 1}, doubtful


def _misfit(name: str, new: Any, old: Any, strict: bool) -> str:
    spec = _spec(new)
    have = _spec(old)
    if hasattr(old, "placements"):
        return f"{name}: the net is already sharded; load the checkpoint into the full net"
    if spec == have:
        return ""

    castable = not strict and spec.shape == have.shape and _kind(new) == _kind(old) != ""
    if not castable:
        return f"{name}: the files have {described(spec)}, the net {described(have)}"
    if not _fits(new.detach(), old.dtype):
        return f"{name}: it has numbers that {have.dtype} cannot represent"
    return ""


def _fits(new: Any, dtype: Any) -> bool:
    """Returns true if a cast keeps every integer, and every finite number finite."""
    cast = new.to(dtype)
    if _kind(new) == "int":
        return bool((cast.to(new.dtype) == new).all())
    return bool((cast.double().isfinite() | ~new.double().isfinite()).all())


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _kind(tensor: Any) -> str:
    """Returns the kind of a dtype, within which casts are allowed; ``""`` for bool and complex: no casts."""
    dtype = str(tensor.dtype).removeprefix("torch.").removeprefix("u").removeprefix("b")
    return next((kind for kind in ("float", "int") if dtype.startswith(kind)), "")
