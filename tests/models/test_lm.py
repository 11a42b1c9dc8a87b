"""The language model."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from launcher.job.schema.models import LanguageModel
from launcher.models.build import build_model
from launcher.models.language_model import STD, Attention


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
    nodes = [n for n in Tracer().trace(model, {"documents": None}).nodes if n.op == "call_module"]
    assert [n.target for n in nodes] == leaves
    assert all(n.args[0].op in ("placeholder", "call_module") for n in nodes)


def test_initial_weights_have_the_stated_spread():
    torch.manual_seed(0)
    model = build_model(lm(dim=256, heads=4, layers=8, vocab_size=512, tied=False))
    std = {n: float(p.detach().std()) for n, p in model.named_parameters() if p.ndim > 1}
    residual = {n for n in std if n.endswith(("o.weight", "down.weight"))}
    assert all(std[n] == pytest.approx(STD / 4, rel=0.03) for n in residual)
    assert all(std[n] == pytest.approx(STD, rel=0.03) for n in std.keys() - residual)
    assert all((p == 1).all() for n, p in model.named_parameters() if p.ndim == 1)
