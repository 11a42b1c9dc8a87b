"""The certificate: what was compared, the verdict, and certificate.json."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.runtime.code_versions import package_version

DISTRIBUTIONS = {"launcher": "autoparallel-launcher", "torch": "torch", "numpy": "numpy"}
PARTS = (
    "loaded", "exported", "weights", "ties", "draws", "loss", "gradient", "norm", "rate", "update", "average",
    "buffer", "statistics", "validation", "samples",
)  # fmt: skip
_WORDS = {
    "weights": "the weights at step 0", "loss": "the loss", "norm": "the global gradient norm",
    "gradient": "the gradient", "update": "the weights after the update", "buffer": "the buffer",
    "samples": "the samples of the next batch", "rate": "the learning rate",
    "ties": "the reference's tie", "draws": "the random numbers", "statistics": "the statistics",
    "average": "the moving average", "validation": "the validation loss", "loaded": "what was loaded",
    "exported": "what was exported",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """How far ``part`` of ``name`` ("" for a single number) is from one process after ``step``.

    ``note`` says why. ``relative_to``: what the error is relative to, if rounding errors of the norm are
    larger than the largest value of the tensor; else 0.
    """

    step: int
    part: str
    name: str
    error: float
    note: str = ""
    relative_to: float = 0.0

    def __str__(self) -> str:
        subject = _WORDS[self.part] + (f" of {self.name}" if self.name else "")
        at = f"step {self.step}: " if self.step else ""
        return (
            f"{at}{subject}: {self.note or f'error {self.error:.1e} against one process{self._relative()}'}"
        )

    def _relative(self) -> str:
        """Returns words for what the error is relative to; "" if that is the largest number of the tensor."""
        if not self.relative_to:
            return ""
        return f", relative to roundings of the gradient norm ({self.relative_to:.1e})"


@dataclass(frozen=True)
class Certificate:
    """The result of comparing a run with one process.

    ``findings`` has one entry for everything that was compared, including small errors.
    """

    findings: tuple[Finding, ...]
    tolerance: float
    precision: str

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """The findings over the tolerance: in the order of the training, the worst of each part first."""
        over_tolerance = [f for f in self.findings if not f.error <= self.tolerance]
        return tuple(sorted(over_tolerance, key=lambda f: (f.step, PARTS.index(f.part), -f.error)))

    @property
    def holds(self) -> bool:
        return bool(self.findings) and not self.wrong

    def worst(self, part: str) -> Finding | None:
        return max((f for f in self.findings if f.part == part), key=lambda f: f.error, default=None)

    def verdict(self) -> str:
        """Returns one line: the largest errors, or the earliest finding that does not hold."""
        if self.holds:
            kinds = len({f.name for f in self.findings if f.part == "gradient"})
            return f"holds: {kinds} parameters, {len(self.findings)} comparisons, {self.largest()}"
        more = f" (and {len(self.wrong) - 1} more)" if len(self.wrong) > 1 else ""
        return f"does not hold (allowed {self.tolerance:.0e}): {self.wrong[0]}{more}"

    def largest(self) -> str:
        """Returns the text of the largest errors; those relative to a gradient norm are counted apart."""
        own = max((f.error for f in self.findings if not f.relative_to), default=0.0)
        absolute = f"largest error {own:.1e}, allowed {self.tolerance:.0e}"
        others = [f for f in self.findings if f.relative_to]
        worst = max(others, key=lambda f: f.error, default=None)
        if worst is None or not worst.error:  # an error of 0 is 0 relative to any number
            return absolute
        these = "1 error of" if len(others) == 1 else f"{len(others)} errors up to"
        are = "is" if len(others) == 1 else "are"
        relative = f"relative to roundings of the gradient norm ({worst.relative_to:.1e})"
        return f"{absolute}; {these} {worst.error:.1e} {are} {relative}"


def verdict(passes: Sequence[Certificate]) -> str:
    """Returns the verdict of the first precision.

    For the others it has what does not hold, or their largest error.
    """
    first, *others = passes
    if not first.holds:
        return first.verdict()
    for c in others:
        if not c.holds:
            return f"in {c.precision} {c.verdict()}"
    return first.verdict() + "".join(f"; in {c.precision} {c.largest()}" for c in others)


def as_json(passes: Sequence[tuple[Certificate, Copy, Plan]], device: str) -> str:
    """Returns the certificate with everything needed to reproduce it.

    ``own``: in the request's own precision.
    """
    # the first pass uses the precision of the comparison, a second one that of the request
    (c, copy, plan), *others = passes
    sizes, job = plan.sizes, copy.job
    versions = {name: package_version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    fields: dict[str, Any] = {
        "holds": all(c.holds for c, _, _ in passes),
        "verdict": verdict([c for c, _, _ in passes]),
        "name": job.name,
        "recipe": job.recipe,
        "versions": {"python": platform.python_version()} | versions,
        "device": device,
        "layout": dict(sizes.grid.axes) | {
            "scheduler": plan.scheduler, "chunks": sizes.chunks, "micro_batches": sizes.micros,
            "stages": len(plan.stages), "tied": [t.name for t in plan.ties],
        },
        "settings": job.parallel.model_dump(mode="json", exclude_defaults=True),
        "seed": plan.seed,
    } | _compared(c, copy)  # fmt: skip

    own = {"own": _compared(*others[0][:2])} if others else {}
    rows = [f" {json.dumps(key)}: {_written(value)}" for key, value in (fields | own).items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _compared(c: Certificate, copy: Copy) -> dict[str, Any]:
    """Returns the results in one precision."""
    return {
        "copy": dict(copy.changes),
        "precision": c.precision,
        "tolerance": c.tolerance,
        "largest": {part: _row(f) for part in PARTS if (f := c.worst(part)) is not None},
        "wrong": [str(f) for f in c.wrong],
        "errors": [_row(f) for f in c.findings],
    }


def _row(f: Finding) -> dict[str, Any]:
    error = f.error if isfinite(f.error) else None  # JSON has no infinity
    more: dict[str, Any] = {"note": f.note} if f.note else {}
    if f.relative_to:  # such a gradient is only rounding errors; this records its allowance
        more["relative_to"] = f.relative_to
    return {"step": f.step, "part": f.part, "name": f.name, "error": error} | more


def _written(value: Any) -> str:
    if isinstance(value, dict) and "errors" in value:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_written(v)}" for key, v in value.items()) + "\n }"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(v)}" for v in value) + "\n ]"
    return json.dumps(value)
