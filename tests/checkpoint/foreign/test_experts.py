"""Separate experts in a folder, compared with the fused tensors of a model."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.checkpoint.foreign.hugging_face import FORMS, joined, split
from launcher.checkpoint.full_tensors import Blobs
from launcher.checkpoint.tensorfile.safetensors import Blob, words
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec

SHAPES = {
    "model.layers.1.mlp.experts.gate_up_proj": (3, 8, 5),
    "model.layers.1.mlp.experts.down_proj": (3, 5, 4),
    "model.layers.1.mlp.gate.weight": (3, 5),
    "model.norm.weight": (5,),
}
OURS = {name: TensorSpec(shape, "float32") for name, shape in SHAPES.items()}


def folder(model_type: str) -> dict[str, np.ndarray]:
    """A tensor of numbers for each name that transformers writes; all differ."""
    names = {
        "mixtral": ("block_sparse_moe", ("w1", (4, 5)), ("w3", (4, 5)), ("w2", (5, 4))),
        "qwen3_moe": ("mlp", ("gate_proj", (4, 5)), ("up_proj", (4, 5)), ("down_proj", (5, 4))),
    }
    block, *matrices = names[model_type]
    at = f"model.layers.1.{block}"
    shapes = {f"{at}.experts.{e}.{m}.weight": shape for e in range(3) for m, shape in matrices}
    shapes |= {f"{at}.gate.weight": (3, 5), "model.norm.weight": (5,)}
    rng = np.random.default_rng(0)
    return {n: rng.random(shape, np.float32) for n, shape in shapes.items()}


def blobs(tensors: dict[str, np.ndarray]) -> Blobs:
    return Blobs({n: Blob.of("float32", t.shape, t.tobytes()) for n, t in tensors.items()})


def read(source: object, name: str, part: Box) -> np.ndarray:
    spec = TensorSpec(part.shape, "float32")
    data = np.empty(spec.nbytes, np.uint8)
    source.fill(name, part, words(data, spec))  # type: ignore[attr-defined]
    return data.view(np.float32).reshape(part.shape)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_any_part_of_experts_is_read_from_the_matrices_of_each(model_type: str) -> None:
    tensors = folder(model_type)
    source = joined(blobs(tensors), model_type, OURS)
    of = [n for n in tensors if ".experts." in n]
    gates, ups, downs = (np.stack([tensors[n] for n in of[k::3]]) for k in range(3))
    want = {
        "model.layers.1.mlp.experts.gate_up_proj": np.concatenate([gates, ups], 1),
        "model.layers.1.mlp.experts.down_proj": downs,
    }
    assert {n: s for n, s in source.specs.items() if ".experts." in n} == {n: OURS[n] for n in want}
    for name, full in want.items():
        for part in (Box((0, 0, 0), full.shape), Box((1, 3, 1), (3, 5, 4)), Box((2, 0, 0), (3, 2, 4))):
            there = tuple(slice(a, b) for a, b in zip(part.lo, part.hi, strict=True))
            assert np.array_equal(read(source, name, part), full[there])


def test_experts_are_not_joined_if_one_matrix_is_missing() -> None:
    tensors = folder("mixtral")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    specs = joined(blobs(tensors), "mixtral", OURS).specs
    assert "model.layers.1.mlp.experts.gate_up_proj" not in specs
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in specs


def test_tensors_are_split_into_the_names_that_folders_have() -> None:
    for model_type in ("mixtral", "qwen3_moe"):
        made = split(model_type, OURS)
        assert {p for parts in made.values() for p in parts} | {*OURS} - {*made} == {*folder(model_type)}
    assert split("llama", OURS) == {}
    assert "mixtral" in FORMS
