"""Random nets that use their weights once to three times, in many kinds of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, WORDS = 4, 5, 7
OPS: dict[str, Callable[[Net, Tensor], Tensor]] = {}


def op(f: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """Register the operation by its name, for nets to use."""
    OPS[f.__name__] = f
    return f


class Net(nn.Module):
    """Runs ``ops`` one after the other on (samples, length, width)."""

    def __init__(self, ops: Sequence[str]) -> None:
        super().__init__()
        self.ops = ops
        self.linear, self.plain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix, self.wide = nn.Linear(LENGTH, LENGTH), nn.Linear(2 * WIDTH, WIDTH)
        self.other, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.other.bias = self.linear.bias
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gru, self.lstm = (kind(WIDTH, WIDTH, batch_first=True) for kind in (nn.GRU, nn.LSTM))
        self.matrix, self.offset = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.columns = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.slices = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.hooked = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.hooked.register_hook(lambda g: g.clamp(-0.5, 0.5))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.first, self.tokens = x, tokens
        for name in self.ops:
            x = torch.tanh(OPS[name](self, x)) + x / 2
        return x


@op
def linear(net: Net, x: Tensor) -> Tensor:
    return net.linear(x)


@op
def same_bias(net: Net, x: Tensor) -> Tensor:
    return net.other(x)


@op
def without_bias(net: Net, x: Tensor) -> Tensor:
    return net.plain(x)


@op
def scaled_weight(net: Net, x: Tensor) -> Tensor:
    return F.linear(x, net.plain.weight * 0.5)


@op
def frozen(net: Net, x: Tensor) -> Tensor:
    return net.frozen(x)


@op
def embedding(net: Net, x: Tensor) -> Tensor:
    return x + net.embed(net.tokens)


@op
def tied_head(net: Net, x: Tensor) -> Tensor:
    return F.linear(x, net.embed.weight).softmax(-1) @ net.embed.weight


@op
def tied_head_transposed(net: Net, x: Tensor) -> Tensor:
    return torch.matmul((x @ net.embed.weight.T).softmax(-1), net.embed.weight)


@op
def sliced(net: Net, x: Tensor) -> Tensor:
    a, b, c = net.slices.unbind()
    return (x @ a @ b) * torch.matmul(x, c)


@op
def convolution(net: Net, x: Tensor) -> Tensor:
    return net.conv(x.transpose(1, 2)).transpose(1, 2)


@op
def recurrent(net: Net, x: Tensor) -> Tensor:
    return net.gru(x)[0]


@op
def long_recurrent(net: Net, x: Tensor) -> Tensor:
    return net.lstm(x)[0]


@op
def normed(net: Net, x: Tensor) -> Tensor:
    return net.norm(x)


@op
def matrix(net: Net, x: Tensor) -> Tensor:
    return x @ net.matrix + net.offset


@op
def matrix_transposed(net: Net, x: Tensor) -> Tensor:
    return F.linear(x, net.matrix.t(), bias=net.offset) + x @ net.matrix.mT


@op
def matrix_permuted(net: Net, x: Tensor) -> Tensor:
    return x @ net.matrix.permute(0, 1) + x @ net.matrix.permute(1, 0)


@op
def matrix_left(net: Net, x: Tensor) -> Tensor:
    return (net.matrix @ x.mT).mT


@op
def matrix_of_itself(net: Net, x: Tensor) -> Tensor:
    return x @ (net.matrix @ net.matrix)


@op
def transformers_conv1d(net: Net, x: Tensor) -> Tensor:
    return torch.addmm(net.offset, x.reshape(-1, WIDTH), net.matrix).view(x.shape)


@op
def scaled_addmm(net: Net, x: Tensor) -> Tensor:
    return torch.addmm(net.offset, x.reshape(-1, WIDTH), net.matrix, alpha=0.3).view(x.shape)


@op
def addmm_of_activations(net: Net, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    return torch.addmm(flat, flat, net.matrix).view(x.shape)


@op
def columns_first(net: Net, x: Tensor) -> Tensor:
    return x @ net.columns + F.linear(x, net.columns)


@op
def hooked(net: Net, x: Tensor) -> Tensor:
    return x @ net.hooked


@op
def one_row(net: Net, x: Tensor) -> Tensor:
    return x + net.linear(x[0, 0])


@op
def skip(net: Net, x: Tensor) -> Tensor:
    return net.wide(torch.cat([x, net.first], -1))


@op
def mixed(net: Net, x: Tensor) -> Tensor:
    return net.mix(x.transpose(1, 2)).transpose(1, 2)


@op
def expanded(net: Net, x: Tensor) -> Tensor:
    return x + net.linear(x).sum() / 100


@op
def untracked(net: Net, x: Tensor) -> Tensor:
    """An input that does not require a gradient."""
    return x @ net.plain(torch.eye(WIDTH, dtype=x.dtype))


@op
def detached(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.linear(x).norm()
    return net.linear(x.detach()) / (1 + scale) * x


@op
def changed_in_place(net: Net, x: Tensor) -> Tensor:
    return net.linear(x).add_(1).mul_(0.5)


@op
def gradient_inside(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x).tanh().sum()
    return x + torch.autograd.grad(y, x, create_graph=True)[0] if x.requires_grad else x


@op
def weight_gradient_inside(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x).tanh().sum()
    return x @ torch.autograd.grad(y, net.linear.weight, create_graph=True)[0]


@op
def saved_by_hooks(net: Net, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
        return net.linear(x)


@op
def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.linear(x).tanh() @ net.matrix, x, use_reentrant=False)


@op
def checkpointed_reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: net.linear(x).tanh() @ net.matrix, x, use_reentrant=True) if x.requires_grad else x


class Inner(Function):
    """A Function whose backward runs a graph of its own, made in the forward or, with ``again``, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net, again: bool, *weights: Tensor) -> Tensor:
        ctx.net, ctx.again, ctx.weights = net, again, weights
        ctx.x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = net.linear(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y = ctx.y
        if ctx.again:
            with torch.enable_grad():
                y = ctx.net.linear(ctx.x)
        to_x, *to_weights = torch.autograd.grad(y, (ctx.x, *ctx.weights), grad, retain_graph=True)
        return to_x, None, None, *to_weights


@op
def backward_inside(net: Net, x: Tensor) -> Tensor:
    return Inner.apply(x, net, False, *net.linear.parameters())


@op
def backward_made_inside(net: Net, x: Tensor) -> Tensor:
    return Inner.apply(x, net, True, *net.linear.parameters())
