"""The language model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx

from launcher.job.schema.components import LanguageModel
from launcher.models.build import build_model
from launcher.models.defaults import resolve
from launcher.models.init import STD
from launcher.models.lm import Attention
from launcher.models.rope import angles, rotate


def lm(**changes):
    sizes = {"name": "lm", "vocab_size": 17, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    return LanguageModel(**sizes | changes)


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"kv_heads": None}, {"kv_heads": 1}, {"ffn_dim": 5}], ids=str)
def test_tokens_become_logits_over_the_vocabulary(changes):
    assert build_model(lm(**changes))(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 17)


def test_modules_have_the_promised_names():
    model = build_model(lm())
    assert [n for n, _ in model.named_children()] == ["embed", "layers", "norm", "head"]
    block = [n for n, m in model.layers[0].named_modules() if not list(m.children())]
    projections = ["attn.q", "attn.k", "attn.v", "attn.o"]
    assert block == ["attn_norm", *projections, "mlp_norm", "mlp.gate", "mlp.up", "mlp.down"]
    assert not list(model.buffers())


def test_a_token_changes_nothing_before_itself():
    model = build_model(lm()).double()
    a = torch.arange(8)[None]
    b = a.clone()
    b[0, 5] = 16
    same = (model(a) == model(b)).all(-1)[0].tolist()
    assert same == [True] * 5 + [False] * 3


@pytest.mark.parametrize(("dtype", "kept", "error"), [("float64", "float64", 1e-12), ("float32", "float32", 4e-8),
                                                     ("bfloat16", "float32", 4e-8)], ids=str)  # fmt: skip
def test_rotary_angles_are_exact_far_into_a_sequence(dtype, kept, error):
    cos, sin = angles(9000, 16, 10000.0, torch.empty(0, dtype=getattr(torch, dtype)))
    assert cos.dtype == sin.dtype == getattr(torch, kept)
    want = np.outer(np.arange(9000), 10000.0 ** (-np.arange(0, 16, 2) / 16))
    np.testing.assert_allclose(cos.double().numpy(), np.cos(want), rtol=0, atol=error)
    np.testing.assert_allclose(sin.double().numpy(), np.sin(want), rtol=0, atol=error)


def test_a_rotated_product_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).expand(2, 12, 8)
    cos, sin = angles(12, 8, 10000.0, q)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).mT
    for distance in range(12):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_worked_out_in_fp32_at_least(dtype):
    assert angles(3, 4, 10000.0, torch.empty(0, dtype=dtype))[0].dtype == torch.float32
    x = torch.randn(3, 4, dtype=dtype)
    assert rotate(x, *angles(3, 4, 10000.0, x)).dtype == dtype


def test_halves_of_the_heads_add_up_to_the_whole():
    whole = Attention(16, 4, 2, 10000.0, STD).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    parts = []
    for half in range(2):
        part = Attention(16, 4, 2, 10000.0, STD).double()
        for name in "qkv":
            weight = getattr(whole, name).weight.chunk(2, 0)[half]
            setattr(getattr(part, name), "weight", torch.nn.Parameter(weight))  # noqa: B010
        part.o.weight = torch.nn.Parameter(whole.o.weight.chunk(2, 1)[half])
        parts.append(part(x))
    torch.testing.assert_close(parts[0] + parts[1], whole(x), rtol=0, atol=1e-12)


def test_the_glue_traces_with_blocks_as_leaves():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return name in leaves

    leaves = ["embed", "layers.0", "layers.1", "norm", "head"]
    with torch.device("meta"):
        model = build_model(lm())
    nodes = list(Tracer().trace(model).nodes)
    assert [n.op for n in nodes] == ["placeholder", *["call_module"] * 5, "output"]
    assert [n.target for n in nodes[1:-1]] == leaves


def test_initial_weights_have_the_stated_spread():
    torch.manual_seed(0)
    model = build_model(lm(dim=256, heads=4, layers=8, vocab_size=512, tied=False))
    std = {n: float(p.detach().std()) for n, p in model.named_parameters() if p.ndim > 1}
    residual = {n for n in std if n.endswith(("o.weight", "down.weight"))}
    assert all(std[n] == pytest.approx(STD / 4, rel=0.03) for n in residual)
    assert all(std[n] == pytest.approx(STD, rel=0.03) for n in std.keys() - residual)
    assert all((p == 1).all() for n, p in model.named_parameters() if p.ndim == 1)


def test_defaults_are_worked_out_once_with_a_note_each():
    settings, notes = resolve(LanguageModel(name="lm", vocab_size=256))
    assert (settings.kv_heads, settings.ffn_dim) == (4, 384)
    assert notes == (
        "model.kv_heads null -> 4: one for each of model.heads",
        "model.ffn_dim null -> 384: 8/3 of model.dim, rounded up to a multiple of 64",
    )
    assert resolve(settings) == (settings, ())
