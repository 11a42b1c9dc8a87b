"""The loss scale of fp16: doubled after many steps with finite gradients, halved when they overflow."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.values.precision import Precision

PATIENCE = 2000
"""Steps without an overflow before the scale is doubled, as in torch's GradScaler."""


@dataclass
class Scaling:
    """The scale of the loss. ``factor`` multiplies the loss; ``good`` counts the steps since it last changed.

    ``skipped`` counts the steps whose gradients overflowed: they changed no weight, and the learning-rate
    schedule does not count them.
    """

    factor: float
    dynamic: bool
    good: int = 0
    skipped: int = 0

    @property
    def lowest(self) -> bool:
        """True if the scale cannot be lowered, so that an overflow is an error."""
        return not self.dynamic or self.factor <= 1.0

    def went_well(self) -> None:
        self.good += 1
        if self.dynamic and self.good >= PATIENCE:
            self.factor *= 2
            self.good = 0

    def overflowed(self) -> None:
        self.factor /= 2
        self.good = 0
        self.skipped += 1


def scaling(dtypes: Precision) -> Scaling:
    """Returns the scaling at the start of training; all dtypes but fp16 keep a factor of 1."""
    return Scaling(dtypes.scale or 1.0, dtypes.dynamic)
