"""Layers whose ``reset_parameters`` is the initialisation that the models here use.

Every module that owns parameters re-initialises those and no others, so that a rank can draw the values of
one module from that module's own seed.
"""

from __future__ import annotations

from torch import nn

STD = 0.02


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Linear(nn.Linear):
    """A linear layer without bias; ``std`` is the standard deviation of its initial weight."""

    def __init__(self, inputs: int, outputs: int, std: float = STD) -> None:
        self.std = std  # before the base class, whose constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Conv(nn.Conv2d):
    """A square convolution without bias, padded to keep the size at stride 1.

    Its initialisation is that of He et al. 2015 over the outputs.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
