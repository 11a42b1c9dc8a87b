"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.job.schema.models import LanguageModel
from launcher.models import language_model
from launcher.models.language_model import Decoder, angles, rotate


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


def decoder(**changed) -> Decoder:
    sizes = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 11}
    torch.manual_seed(0)
    return Decoder(LanguageModel.model_validate({"name": "lm", **sizes, **changed}))


@pytest.fixture
def tables():
    """A function that returns how many tables were made, and how often one was reused."""
    language_model._table.cache_clear()
    yield lambda: (language_model._table.cache_info().misses, language_model._table.cache_info().hits)
    language_model._table.cache_clear()


def test_all_layers_and_steps_read_one_table(tables):
    model = decoder()
    for _ in range(2):
        model(torch.arange(10).view(2, 5)).sum().backward()
    assert tables() == (1, 5)


def test_the_table_has_the_bits_that_are_worked_out_where_it_is_used(tables):
    sizes = (3, 700, 16, 10000.0)
    for dtype in (torch.float32, torch.float64):
        kept = language_model._table(*sizes, dtype=dtype, device=torch.device("cpu"))
        again = language_model._compute_table(*sizes, dtype=dtype, device=torch.device("cpu"))
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_traced_forwards_do_not_fill_the_cache_of_angles(tables):
    tokens = torch.arange(10).view(2, 5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder()(torch.zeros(2, 5, dtype=torch.long))
    with torch.device("meta"):
        decoder()(torch.zeros(2, 5, dtype=torch.long))
    model = decoder()
    torch.func.functional_call(model, dict(model.named_parameters()), (tokens,)).sum()
    with torch.device("cpu"):  # a function mode is active
        model(tokens)
    torch.func.vmap(lambda t: language_model.angles(4, 8, 1e4, t)[0])(torch.zeros(3, 2))
    assert tables() == (1, 2)  # functional_call counts as a plain call


def test_a_table_first_read_in_inference_mode_serves_a_backward(tables):
    model, tokens = decoder(), torch.arange(10).view(2, 5)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert tables()[0] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_no_graph_of_a_compiled_block_works_out_angles():
    """A compiler fuses pointwise operations into their users: pow, cos, sin in float64 for each element of q and k."""
    block, calls = decoder().layers[0], []

    def collect(graph, _):
        calls.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    x = torch.randn(2, 16, 32, requires_grad=True)
    backend = aot_autograd(fw_compiler=collect, decompositions=select_decomp_table())
    out = torch.compile(block, backend=backend, fullgraph=True)(x)
    out.sum().backward()

    assert calls.count("launcher.rotary_table.default") == 1
    assert not [c for c in calls if c.startswith(("aten.cos.", "aten.sin.", "aten.pow.Scalar", "aten.arange"))]
    assert any(c.startswith("aten.mm") for c in calls)
    torch.testing.assert_close(out, block(x), rtol=1e-5, atol=1e-6)
