"""Models whose data decide what runs. Inputs: floats (tokens, 6), and scores of the experts (tokens, 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SKIPPED: set[str] = set()
"""The blocks that ``Drops`` leaves out. No tensor contains this, so nothing on the meta device can know it."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to its best ``top`` experts; ``empty``: experts without tokens are called too."""

    def __init__(self, top: int = 1, empty: bool = False, experts: nn.ModuleList | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4)) if experts is None else experts
        self.top, self.empty = top, empty

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = (self.router(flat) + who.flatten(0, 1)).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            token, place = torch.nonzero(chosen == n, as_tuple=True)
            if token.numel() or self.empty:
                out = out.index_add(0, token, expert(flat.index_select(0, token)) * weight[token, place, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, mixture: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(6), Mixture() if mixture is None else mixture

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x), who)


class Net(nn.Module):
    """Blocks between a linear layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(self.block(n) for n in range(4))
        self.head = nn.Linear(6, 3)

    def block(self, n: int) -> nn.Module:
        return Block()

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, who)
        return self.head(x).mean(1)


class Top1(Net):
    """One expert per token; experts without tokens are not called."""


class Top2(Net):
    """Two experts per token; experts without tokens are called with an empty tensor."""

    def block(self, n: int) -> nn.Module:
        return Block(Mixture(2, empty=True))


class Lone(Net):
    """Every other block is only a mixture, whose output has no graph if none of its tokens is selected."""

    def block(self, n: int) -> nn.Module:
        return Block() if n % 2 else Block(Some())


class Some(nn.Module):
    """The expert processes the tokens whose first score is positive; the others get zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = Expert()

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        mine = who[..., 0] > 0
        if not mine.any():
            return torch.zeros_like(x).detach()
        out = torch.zeros_like(x)
        out[mine] = self.expert(x[mine])
        return out


class Tied(nn.Linear):
    """A separate layer with the weights of ``other``."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__(other.in_features, other.out_features)
        self.weight, self.bias = other.weight, other.bias


class Shared(Net):
    """The last block's experts share weights with the first block's; a third block calls one expert twice."""

    def __init__(self) -> None:
        super().__init__()
        for mine, theirs in zip(self.blocks[3].mixture.experts, self.blocks[0].mixture.experts, strict=True):
            mine.up, mine.down.weight = Tied(theirs.up), theirs.down.weight
        self.blocks[2].mixture.experts[3] = self.blocks[2].mixture.experts[1]


class Passes(nn.Module):
    """Returns its input if no token has a positive second score."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Expert()

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        if (who[..., 1] <= 0).all():
            return x
        return x + self.inner(x)


class Skips(Net):
    """Some blocks return their input unchanged, depending on the data."""

    def block(self, n: int) -> nn.Module:
        return Passes() if n % 2 else Block()


class Exits(Net):
    """Stops after a number of blocks that depends on the data."""

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        x = self.embed(x)
        for n, block in enumerate(self.blocks):
            x = block(x, who)
            if (who[..., n] > 0).any():
                break
        return self.head(x).mean(1)


class Permutes(Net):
    """Runs its blocks in an order that depends on the data."""

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        x = self.embed(x)
        for n in who.mean((0, 1)).argsort().tolist():
            x = self.blocks[n](x, who)
        return self.head(x).mean(1)


class Drops(Net):
    """Leaves out blocks for a reason that is not in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)

    def block(self, n: int) -> nn.Module:
        return Block(Plain())

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        x = self.embed(x)
        order = reversed(self.blocks) if "turned" in SKIPPED else self.blocks
        for n, block in enumerate(order):
            if f"blocks.{n}" not in SKIPPED:
                x = block(x, who)
        return self.head(x).mean(1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert = Expert()

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        return self.expert(x) + who.sum(-1, keepdim=True)
