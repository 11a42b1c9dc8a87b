"""Joins and splits experts: transformers saves them one by one, and its models have one tensor per layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt

from launcher.checkpoint.chunked import slices
from launcher.checkpoint.full_tensors import FullTensors
from launcher.checkpoint.layout.shards import whole
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.layout import Box


@dataclass(frozen=True)
class Form:
    """How a family of models names, in a folder, the module around its experts and their matrices."""

    block: str
    gate: str
    up: str
    down: str


SEVERAL = Form("mlp", "gate_proj", "up_proj", "down_proj")
FORMS = {
    "mixtral": Form("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"), SEVERAL),
}
"""The forms by ``model_type``, for the models whose experts transformers 5 saves one by one."""
OURS = re.compile(r"(?P<layer>.*)\.mlp\.(?P<what>experts\.gate_up_proj|experts\.down_proj|gate\.weight)")

Pieces = Mapping[str, Box]
"""The tensors of a folder that make up one tensor of the model, each with its box in that tensor."""


def pieces(form: Form, name: str, shape: tuple[int, ...]) -> dict[str, Box]:
    """Returns the pieces of the model's tensor ``name``; empty if a folder has the tensor unchanged.

    In ``gate_up_proj`` the rows of each expert are those of the gate, then those of ``up``.

    >>> found = pieces(FORMS["mixtral"], "layers.0.mlp.experts.down_proj", (2, 4, 8))
    >>> [*found][1], found["layers.0.block_sparse_moe.experts.1.w2.weight"]
    ('layers.0.block_sparse_moe.experts.1.w2.weight', Box(lo=(1, 0, 0), hi=(2, 4, 8)))
    """
    match = OURS.fullmatch(name)
    if match is None:
        return {}
    at = f"{match['layer']}.{form.block}"
    if match["what"] == "gate.weight":
        return {} if form.block == "mlp" else {f"{at}.gate.weight": whole(shape)}
    count, rows, columns = shape
    halves = (form.down,) if match["what"].endswith(".down_proj") else (form.gate, form.up)
    height = rows // len(halves)
    return {
        f"{at}.experts.{e}.{half}.weight": Box((e, n * height, 0), (e + 1, (n + 1) * height, columns))
        for e in range(count)
        for n, half in enumerate(halves)
    }


def split(model_type: object, specs: Mapping[str, TensorSpec]) -> dict[str, Pieces]:
    """Returns, for a model of this type, the pieces of each tensor that a folder does not have unchanged."""
    form = FORMS.get(str(model_type))
    if form is None:
        return {}
    found = {name: pieces(form, name, spec.shape) for name, spec in specs.items()}
    return {name: parts for name, parts in found.items() if parts}


@dataclass(frozen=True)
class Joined:
    """The tensors of ``source``, but with the tensors ``whole`` in place of the pieces that make them up."""

    source: FullTensors
    whole: Mapping[str, TensorSpec]
    parts: Mapping[str, Pieces]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        used = {piece for parts in self.parts.values() for piece in parts}
        return {n: s for n, s in self.source.specs.items() if n not in used} | dict(self.whole)

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        if name not in self.parts:
            return self.source.fill(name, part, out)
        for piece, box in self.parts[name].items():
            both = part & box
            if both is not None:
                there, here = both.within(box), both.within(part)
                matrix = Box(there.lo[-2:], there.hi[-2:])  # the box in one expert's matrix
                self.source.fill(piece, matrix, out[slices(here)].reshape(matrix.shape))


def joined(source: FullTensors, model_type: object, ours: Mapping[str, TensorSpec]) -> FullTensors:
    """Returns ``source`` with experts joined as in the model ``ours``, if it has all pieces of a tensor."""
    specs = source.specs
    found = {n: parts for n, parts in split(model_type, ours).items() if _fits(specs, parts)}
    if not found:
        return source
    dtypes = {n: next(specs[piece].dtype for piece in parts) for n, parts in found.items()}
    return Joined(source, {n: TensorSpec(ours[n].shape, dtypes[n]) for n in found}, found)


def _fits(specs: Mapping[str, TensorSpec], parts: Pieces) -> bool:
    """Whether every piece exists in its shape, and all have one dtype."""
    if any(piece not in specs for piece in parts):
        return False
    shapes = all(specs[piece].shape == box.shape[-2:] for piece, box in parts.items())
    return shapes and len({specs[piece].dtype for piece in parts}) == 1
