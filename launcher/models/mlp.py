"""The network of MindSpore's own AutoParallel example."""

from __future__ import annotations

from torch import Tensor, nn

from launcher.job.schema.components import AutoParallelMLP


class Network(nn.Module):
    """Samples (batch, ...) of ``features`` values each -> logits (batch, classes)."""

    def __init__(self, settings: AutoParallelMLP) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(settings.features, settings.hidden, bias=False)  # MatMulCell
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(settings.hidden, settings.hidden)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(settings.hidden, settings.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.layer1(self.flatten(x)))
        x = self.relu2(self.layer2(x))
        logits: Tensor = self.layer3(x)
        return logits
