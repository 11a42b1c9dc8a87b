"""``import``: another program's weights as the checkpoint of step 0, in the layout of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.checkpoint.foreign.cast import Cast, differing, exact
from launcher.checkpoint.foreign.import_tensors import import_whole
from launcher.checkpoint.foreign.mismatches import strange
from launcher.checkpoint.foreign.read import outline, read_incoming
from launcher.checkpoint.foreign.rename_tables import to_ours
from launcher.checkpoint.full_tensors import FullTensors, RenamedTensors
from launcher.checkpoint.layout.derived import of_plan
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.store import latest, point, step_folder
from launcher.errors import Problem, RequestError, said
from launcher.job.schema.steps import Import
from launcher.plan.cost.memory import bytes_text
from launcher.plan.plan import Plan
from launcher.plan.settings.saving import ANYONE, Trust
from launcher.plan.values.text import many


def place(checkpoints: Path) -> Path:
    """What ``run`` writes."""
    return step_folder(checkpoints, 0)


def misfits(name: str, step: Import, plan: Plan) -> list[Problem]:
    """What keeps the source of the step ``name`` from becoming the model of ``plan``, found in heads alone."""
    strategy = Path(step.strategy) if step.strategy else None
    try:
        found = outline(Path(step.src), strategy)
    except (ValueError, OSError) as error:
        return [Problem(f"steps.{name}.src", said(error))]
    return strange(f"steps.{name}", step.src, found, step.names, of_plan(plan), strict=step.strict)


def run(
    name: str,
    step: Import,
    plan: Plan,
    checkpoints: Path,
    say: Callable[[str], None],
    *,
    anew: bool,
    known: Trust = ANYONE,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, float]:
    """Everything is checked before the checkpoint appears, encrypted with the key of ``known``; it becomes the newest.

    What the run has saved since an earlier start is kept: the ranks go on from that. ``anew``: not.
    """
    target, final = of_plan(plan), place(checkpoints)
    if not anew and (newest := latest(checkpoints, known)) is not None and newest != final:
        say(f"import: not again, for the run has gone on to {newest.name}")
        return {}
    if wrong := misfits(name, step, plan):
        raise RequestError(tuple(wrong))
    checkpoints.mkdir(parents=True, exist_ok=True)
    strategy = Path(step.strategy) if step.strategy else None
    found = read_incoming(Path(step.src), to_ours(step.names), strategy=strategy, strict=step.strict)
    tensors, left = found.tensors, [*found.left]
    if not step.strict:
        left += [n for n in tensors.specs if n not in target.named]
        tensors = RenamedTensors(tensors, {n: n for n in tensors.specs if n in target.named})
    results = {"saved_step": 0}
    state = {"step": 0, "seed": plan.seed, "name": plan.name, "batch_size": plan.sizes.global_batch,
             "settings": dict(settings), "results": results}  # fmt: skip
    done = import_whole(_as_kept(tensors, target, say), final, target, state, overwrite=True, key=known.key)
    point(final, known.key)
    ranks = many(target.grid.size, "rank")
    say(f"import: {step.src} -> {final.name}, {many(len(target.entries), 'tensor')} on {ranks}, "
        f"{bytes_text(done.bytes_written)}")  # fmt: skip
    if left:
        say(f"import: left out, for this model has no place for it: {', '.join(left)}")
    if found.others:
        say(f"import: left out, for it is no tensor: {', '.join(found.others)}")
    return dict(results)


def _as_kept(tensors: FullTensors, target: Strategy, say: Callable[[str], None]) -> FullTensors:
    """Weights as wide as the run keeps them, which ``train.precision`` says; what is cast is said."""
    specs = tensors.specs
    into = differing(specs, {name: target.entries[first].spec for name, first in target.named.items()})
    pairs = Counter((specs[name].dtype, dtype) for name, dtype in into.items())
    for (old, new), count in pairs.items():
        kept = "every number kept" if exact(old, new) else "each number rounded to the nearest"
        say(f"import: {many(count, 'tensor')} cast from {old} to {new}, {kept}")
    return Cast(tensors, into)
