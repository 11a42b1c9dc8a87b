"""The same step in other code: a plain Llama, as fast as we can write it, and that of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from benchmarks.gpu.device import describe, milliseconds, peak_bytes, reset_peak, seconds
from benchmarks.gpu.lab import PartContext
from benchmarks.gpu.request import Shape, backend, planned, shape
from benchmarks.gpu.training import speed, threads, times

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of one micro batch, from its tokens and its targets."""
THETA, EPS, RATE, CLIP = 1e4, 1e-5, 1e-4, 1.0


class Block(nn.Module):
    """One decoder block: queries, keys and values in one product, gate and up in another."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.widths = [s.heads * s.head, s.kv_heads * s.head, s.kv_heads * s.head]
        self.head = s.head
        self.attn_norm = nn.RMSNorm(s.dim, eps=EPS)
        self.qkv = nn.Linear(s.dim, sum(self.widths), bias=False)
        self.o = nn.Linear(s.dim, s.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(s.dim, eps=EPS)
        self.gate_up = nn.Linear(s.dim, 2 * s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.attn_norm(x)).split(self.widths, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in parts)
        out = scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the heads rotated by the angles of their positions, in fp32."""
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(t.dtype)


class Llama(nn.Module):
    """The modules of a Llama, and a table of its rotation angles; ``plain`` calls them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocabulary, s.dim)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.dim, eps=EPS)
        self.head = nn.Linear(s.dim, s.vocabulary, bias=False)
        rates = THETA ** (-torch.arange(0, s.head, 2, dtype=torch.float64) / s.head)
        angles = torch.outer(torch.arange(s.time, dtype=torch.float64), rates)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)


def plain(s: Shape, device: torch.device, compiled: str = "") -> tuple[nn.Module, Loss]:
    """Return the model in bf16 and its loss function.

    ``compiled``: the backend that compiles each block, and the head together with the loss.
    """
    with device:
        model = Llama(s)
    for module in model.modules():  # the table of angles stays in fp32
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().bfloat16()))
    blocks: list[Any] = list(model.layers)
    end: Any = lambda x, y: cross_entropy(model.head(model.norm(x)).flatten(0, 1).float(), y.flatten())  # noqa: E731
    if compiled:
        end = torch.compile(end, backend=compiled)
        blocks = [torch.compile(block, backend=compiled) for block in blocks]

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        x = model.embed(tokens)
        for block in blocks:
            x = block(x, model.cos, model.sin)
        mean: Tensor = end(x, targets)
        return mean

    return model, loss


def transformers(s: Shape, device: torch.device) -> tuple[nn.Module, Loss]:
    """``LlamaForCausalLM`` of that shape in bf16, with torch's attention, as its users run it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=s.vocabulary,
        hidden_size=s.dim,
        intermediate_size=s.ffn,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=s.time,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).train()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return model, loss


def step_of(model: nn.Module, loss: Loss, s: Shape, device: torch.device) -> Callable[[], float]:
    """Return a function that runs one optimizer step.

    Copies of the weights in bf16 compute. The weights, the sums of gradients and AdamW's state are in fp32.
    """
    used = list(model.parameters())
    kept = [p.detach().float().requires_grad_() for p in used]
    optimizer = torch.optim.AdamW(kept, lr=RATE, fused=True)
    drawn = torch.randint(0, s.vocabulary, (s.batch, s.time + 1), device=device)
    tokens, targets = drawn[:, :-1].chunk(s.micros), drawn[:, 1:].chunk(s.micros)

    def one() -> float:
        with torch.no_grad():
            torch._foreach_copy_(used, kept)
        total = torch.zeros((), device=device)
        for x, y in zip(tokens, targets, strict=True):
            part = loss(x, y) / s.micros
            part.backward()
            total += part.detach()
            _accumulate_grads(kept, used)
        torch.nn.utils.clip_grad_norm_(kept, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return one


@torch.no_grad()
def _accumulate_grads(kept: list[Tensor], used: list[Tensor]) -> None:
    """Add the gradients of one micro batch to the sums, and clear them."""
    if kept[0].grad is None:
        for sums, p in zip(kept, used, strict=True):
            assert p.grad is not None
            sums.grad = p.grad.float()
    else:
        torch._foreach_add_([t.grad for t in kept], [p.grad for p in used])
    for p in used:
        p.grad = None


def measure(context: PartContext, kind: str) -> None:
    """Measure one reference. ``kind``: ``plain``, ``plain_compile`` or ``transformers``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(context.root / f"compiled-{context.name}")
    job, plan = planned(context)
    s = shape(job, plan)
    if kind == "transformers":
        import transformers as library

        context.report(version=library.__version__)
    describe(context.device)

    context.wait_for_turn()
    torch.set_num_threads(threads(context))
    device = torch.device(context.device, 0) if context.device != "cpu" else torch.device("cpu")
    torch.manual_seed(0)
    if kind == "transformers":
        model, loss = transformers(s, device)
    else:
        model, loss = plain(s, device, backend(context) if kind == "plain_compile" else "")
    one = step_of(model, loss, s, device)
    losses: list[float] = []
    context.report(first_step_s=round(seconds(lambda: losses.append(one()), device), 2))
    reset_peak(device)
    seconds(lambda: losses.append(one()), device)
    if (most := peak_bytes(device)) is not None:
        context.report(measured_bytes=most[0], reserved_bytes=most[1])
    took = milliseconds(lambda: losses.append(one()), device, times(context))
    context.report(**took, **speed(context, job, plan, took["ms"]), losses=[round(x, 5) for x in losses[:4]])
