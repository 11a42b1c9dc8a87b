"""State of modules and of global random streams.

Nothing in a checkpoint runs code when it is read. It contains numbers, strings, bytes, tensors, arrays, and
lists, tuples, sets and dicts of those. Ranks with the same state share an entry.
"""

from __future__ import annotations

import base64
import json
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.checkpoint.read import Checkpoint
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.errors import RunError
from launcher.parallel.parallel_model import ParallelModel
from launcher.parallel.trace.tensor_specs import dtype_of, spec
from launcher.plan.resolve.checkpoint import STREAM
from launcher.plan.values.module_names import listed
from launcher.runtime.cluster.messages import all_gather
from launcher.runtime.training.session import Session

PLAIN = (bool, int, float, str, type(None))
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict}


def extra_state_text(model: ParallelModel) -> str:
    """Returns the extra state of this rank's modules by name, as text that is equal for equal states.

    Raises ``RunError`` for values that a checkpoint cannot store.
    """
    return json.dumps(
        {name: _encoded(m.get_extra_state(), name) for name, m in _saying(model)}, sort_keys=True
    )


def gather_extra_states(model: ParallelModel) -> dict[str, Any] | None:
    """Returns the extra states of all ranks; every rank calls it. ``None`` if no module has any."""
    every = all_gather(extra_state_text(model), str)
    texts = [*dict.fromkeys(every)]
    if texts == ["{}"]:
        return None
    return {"ranks": [texts.index(t) for t in every], "values": [json.loads(t) for t in texts]}


def restore(model: ParallelModel, saved: Any, rank: int, same_layout: bool) -> list[str]:
    """Restores each module's state; in another layout the state from the first rank that had the module.

    Returns the names of modules for which the checkpoint has no state.
    """
    values: list[Mapping[str, Any]] = list(saved["values"]) if isinstance(saved, Mapping) else []
    if same_layout and values:
        values.insert(0, values[saved["ranks"][rank]])
    missing = []
    for name, module in _saying(model):
        state = next((v for v in values if name in v), None)
        if state is None:
            missing.append(name)
        else:
            module.set_extra_state(_decoded(state[name]))
    return missing


def _saying(model: ParallelModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields this rank's modules that override ``get_extra_state``, each once."""
    modules: dict[str, nn.Module] = {}
    for part in model.parts:
        for name, module in part.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                modules.setdefault(name, module)
    yield from modules.items()


def _encoded(value: Any, name: str) -> Any:
    kind = type(value).__name__
    if type(value) in PLAIN:
        return value
    if isinstance(value, bytes | bytearray):
        return {"bytes": _text(bytes(value))}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {"tensor": [spec(flat).dtype, list(flat.shape), _text(raw)]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        array = np.ascontiguousarray(value)
        return {"array": [array.dtype.str, list(np.shape(value)), _text(array.tobytes())]}
    if type(value) in SEQUENCES.values():
        items = [_encoded(v, name) for v in value]
        most = value.maxlen if isinstance(value, deque) else None
        return {kind: items} if most is None else {kind: items, "maxlen": most}
    if type(value) in MAPPINGS.values():
        return {kind: [[_encoded(k, name), _encoded(v, name)] for k, v in value.items()]}
    text = f"{name or 'the model'}.get_extra_state() returns a {kind}, which checkpoints cannot store"
    cure = "return numbers, strings, bytes, tensors, arrays, or lists and dicts of those"
    raise RunError(f"{text}; {cure}")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    most = value.pop("maxlen", None) if "deque" in value else None
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tensor":
        dtype, shape, text = content
        if not text:
            return torch.empty(shape, dtype=dtype_of(dtype))
        raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        return raw.view(dtype_of(dtype)).reshape(shape)
    if kind == "array":
        dtype, shape, text = content
        return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    if kind == "deque":
        return deque(map(_decoded, content), most)
    if kind in SEQUENCES:
        return SEQUENCES[kind](map(_decoded, content))
    return MAPPINGS[kind]((_decoded(k), _decoded(v)) for k, v in content)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


PYTHON, NUMPY = f"{STREAM}python", f"{STREAM}numpy"


def seed(words: np.ndarray) -> None:
    """Seeds both streams with two 32-bit words."""
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))


def saved() -> dict[str, Blob]:
    """Returns the current states."""
    kind, keys, place, full, kept = np.random.get_state()
    numpy = [str(kind), np.asarray(keys).tolist(), int(place), int(full), float(kept)]
    return {PYTHON: _blob(random.getstate()), NUMPY: _blob(numpy)}


def restore_streams(own: Mapping[str, Blob]) -> None:
    """Restores the states; keeps the current one if an older checkpoint lacks it."""
    if PYTHON in own:
        version, numbers, kept = json.loads(bytes(own[PYTHON].data))
        random.setstate((version, tuple(numbers), kept))
    if NUMPY in own:
        kind, keys, *rest = json.loads(bytes(own[NUMPY].data))
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def _blob(state: object) -> Blob:
    raw = json.dumps(state).encode()
    return Blob.of("uint8", (len(raw),), raw)


def restore_module_state(s: Session, checkpoint: Checkpoint, same_layout: bool) -> None:
    """Restores the extra state of modules; reports the modules for which the checkpoint has none."""
    missing = restore(s.model, checkpoint.state.get("modules"), s.world.rank, same_layout)
    if missing:
        text = f"{checkpoint.folder.name} has no extra state of {listed(missing)}: it is reset"
        s.emit({"text": text})
