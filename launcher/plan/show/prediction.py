"""The rows of a plan about the predicted seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.plan.time.prediction import Prediction
from launcher.plan.values.text import scaled, seconds_text

LARGEST_TERMS = 3
WAITS = {
    "kernels": "the devices",
    "collectives over tp": "the links between ranks of tp",
    "pipeline bubble": "other stages",
    "gradients and weights on the network": "the links between data-parallel ranks",
    "optimizer": "the memory of the devices",
    "overheads": "the host",
    "allocator near its limit": "the allocator: less memory is faster",
}
"""What each term waits for."""


def prediction_rows(step: Prediction | None) -> Iterator[tuple[str, str]]:
    """Yields the rows; none if ``step`` is ``None``: the request does not state the speeds of devices."""
    if step is None:
        return
    count, unit = (step.samples, "samples") if step.tokens is None else (step.tokens, "tokens")
    rate = count / step.seconds
    speed = f"{_short(rate)} {unit}/s, {_short(rate / step.devices)} a device"
    took = f"{seconds_text(step.seconds)} a step on {step.cluster}"
    yield "time", f"{took}: {speed}, MFU {step.mfu:.1%} (predicted)"
    largest = sorted(step.terms, key=lambda t: -t.seconds)[:LARGEST_TERMS]
    parts = [
        f"{t.name} {t.seconds / step.seconds:.0%} (for {WAITS[t.name]})"
        for t in largest
        if t.seconds >= step.seconds / 200
    ]
    yield "time", f"waits: {', '.join(parts)}"


def _short(n: float) -> str:
    """
    >>> _short(39_012.3), _short(88.31)
    ('39.0k', '88')
    """
    number, prefix = scaled(n)
    return f"{number}{prefix}"
