"""Weights that are used in more than one place."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.zoo.case import ABCD, D, Net, odd, tokens


class Lm(nn.Module):
    """Tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, D)
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.head = nn.Linear(D, 8, bias=False)
        self.extra()

    def extra(self) -> None:
        """Make more parts."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(self.embed(x)).tanh()).tanh())
        return out


LM = ("embed", "a", "b", "head")


@tokens(*LM)
class TiedByIdentity(Lm):
    """Embedding and head are one tensor."""

    def extra(self) -> None:
        self.head.weight = self.embed.weight


@tokens("embed", "a", "b")
class TiedByLinear(Lm):
    """The head is F.linear with the embedding's weight."""

    def extra(self) -> None:
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.b(self.a(self.embed(x)).tanh()), self.embed.weight)


@tokens("embed", "a", "b")
class TiedTransposed(Lm):
    """The head multiplies by the embedding's transpose, scaled."""

    def extra(self) -> None:
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.embed(x)).tanh()) @ self.embed.weight.t() * 0.7


@tokens(*LM)
class TiedThrice(Lm):
    """One tensor in three layers."""

    def extra(self) -> None:
        self.a.weight = self.head.weight
        self.b.weight = self.head.weight


@odd(*ABCD)
class SharedBiasOneStage(Net):
    """A bias shared by two adjacent blocks."""

    def extra(self) -> None:
        self.b[0].bias = self.a[0].bias


@odd(*ABCD)
class SharedBiasAcross(Net):
    """A bias shared by the first layer and the last."""

    def extra(self) -> None:
        self.d.bias = self.a[0].bias


@tokens("embed", "a", "b", "head")
class EmbeddedTwice(Lm):
    """The embedding is called twice, the second time with shifted tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.embed((x + 1) % 8).tanh()
        return self.head(self.b(self.a(h)).tanh())


@tokens("embed", "a", "b", "head")
class EmbeddedLate(Lm):
    """The embedding is called again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(self.embed(x)).tanh())
        return self.head(h + self.embed((x + 1) % 8))


@odd("a", "b", "c", "d")
class CalledTwice(Net):
    """One module is called twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.b(self.a(x)))))


@odd("a", "b", "c", "d")
class CalledAgainLate(Net):
    """The first module is called again after the third."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.a(self.c(self.b(self.a(x)))))


@odd()
class CalledAgainAuto(Net):
    """The first module is called again after the third; split by ``auto``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.a(self.c(self.b(self.a(x)))))


@odd("a", "b", "c", "d")
class TwoNames(Net):
    """One module under two names, both of which are called."""

    def extra(self) -> None:
        self.again = self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.again(self.b(self.a(x)))))


@odd("a", "b", "c", "d")
class TiedByTranspose(Net):
    """An autoencoder whose decoder uses the encoder's transposed weights."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        return self.d(F.linear(h, self.a[0].weight.t(), self.b[0].bias))


@odd("left", "right", "head")
class Siamese(nn.Module):
    """Two towers with the same weights and their own heads."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.right = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        for mine, other in ((0, 0), (2, 2)):
            self.right[mine].weight = self.left[other].weight
            self.right[mine].bias = self.left[other].bias
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.left(x) - self.right(x.flip(-1))).abs())
