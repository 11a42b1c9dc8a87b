"""Reads inputs from a safetensors file: one tensor per input of the model, samples along dim 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checkpoint.tensorfile.safetensors import described, read_header
from launcher.plan.plan import Plan
from launcher.plan.values.module_names import listed
from launcher.plan.values.tensor_spec import TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


def names(count: int) -> tuple[str, ...]:
    """Returns the names of the tensors for a model with ``count`` inputs; a single one may have any name."""
    return tuple(f"input{i}" for i in range(count))


def specs(path: Path) -> dict[str, TensorSpec]:
    """Returns the specs of all tensors in the file. Raises ``ValueError`` and ``OSError``."""
    return {name: slot.spec for name, slot in read_header(path).entries.items()}


def in_order(file_specs: Mapping[str, TensorSpec], count: int) -> tuple[str, ...] | None:
    """Returns the names in the file, in the order of the forward's arguments.

    Returns ``None`` if they do not match.
    """
    if count == 1 and len(file_specs) == 1:
        return tuple(file_specs)
    return names(count) if {*file_specs} == {*names(count)} else None


def misfits(file_specs: Mapping[str, TensorSpec], plan: Plan) -> Iterator[str]:
    """Yields why these tensors are not inputs of the model of ``plan``."""
    expected, mixed = plan.inputs, plan.observed.mixed
    order = in_order(file_specs, len(expected))
    if order is None:
        takes = f"the model takes {len(expected)}: {', '.join(names(len(expected)))}"
        yield f"has {', '.join(sorted(file_specs)) or 'no tensors'}, but {takes}"
        return
    for name, want in zip(order, expected, strict=True):
        has = file_specs[name]
        floats = _floating(has) and _floating(want)
        if not has.shape or has.shape[1:] != want.shape[1:] or (has.dtype != want.dtype and not floats):
            sample = TensorSpec(want.shape[1:], want.dtype)
            yield f"{name} is {described(has)}, but the model takes {described(sample)} per sample"
    if len({file_specs[name].shape[:1] for name in order}) > 1:
        yield f"numbers of samples differ: {', '.join(f'{n} {described(file_specs[n])}' for n in order)}"
    elif file_specs[order[0]].shape[:1] == (0,):
        yield "has no samples"
    elif mixed and file_specs[order[0]].shape[0] % plan.sizes.micro_batch:
        text = f"{listed(mixed)} normalizes over the samples of a micro batch also in evaluation mode"
        yield f"{text}, and the last one would be padded: give a multiple of {plan.sizes.micro_batch} samples"


def _floating(t: TensorSpec) -> bool:
    return t.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class FileInputs:
    """Samples by index, read when they are requested."""

    path: Path
    order: tuple[str, ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def inputs(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Returns the inputs of these samples, in the order of ``indices``."""
        from safetensors import safe_open

        low, high = int(indices.min()), int(indices.max()) + 1
        with safe_open(self.path, framework="pt") as file:
            return tuple(file.get_slice(name)[low:high][indices - low] for name in self.order)

    def targets(self, indices: npt.NDArray[np.int64]) -> Tensor:
        raise NotImplementedError("only inputs; predictions are not compared")


def open_inputs(path: Path, count: int) -> FileInputs:
    """Returns the inputs in a file without ``misfits``, for a model with ``count`` inputs."""
    file_specs = specs(path)
    order = in_order(file_specs, count)
    assert order is not None
    return FileInputs(path, order, file_specs[order[0]].shape[0])
