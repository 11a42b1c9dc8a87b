"""``import``: stores another program's weights as the checkpoint of step 0, in the layout of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from launcher.checkpoint.cast import Cast, differing, exact
from launcher.checkpoint.foreign import mismatches
from launcher.checkpoint.foreign.import_checkpoint import form_of, import_tensors, outline, read_incoming
from launcher.checkpoint.foreign.names import renamed, to_ours
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.full_tensors import FullTensors, RenamedTensors
from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.store import latest, point, step_folder
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.data.cifar10_fallback import with_data_read
from launcher.errors import Problem, RequestError, error_text
from launcher.job.schema.steps import Import
from launcher.plan.may_change_on_resume import recorded
from launcher.plan.plan import Plan
from launcher.plan.values.text import bytes_text, many
from launcher.steps.file_checks import FileChecks, RunFiles


def check(step: Import, at: FileChecks) -> list[Problem]:
    strategy = None if step.strategy is None else Path(step.strategy)
    problems = at.problems("names", lambda: renamed((), to_ours(step.names)))
    if at.here(step.src):
        problems += at.problems("src", lambda: form_of(Path(step.src)))
    if at.here(step.strategy):
        problems += at.problems("strategy", lambda: open_strategy("strategy", step.strategy))
    if not problems and at.here(step.src) and not at.later(strategy):
        problems = at.problems("src", lambda: outline(Path(step.src), strategy))
    return problems


def plan_problems(step: Import, at: FileChecks, plan: Plan) -> list[Problem]:
    away = not Path(step.src).exists() if at.shown else at.later(step.src)
    return [] if away else misfits(at.name, step, plan)


def pending(step: Import, at: FileChecks) -> list[str]:
    if Path(step.src).exists():
        return []
    return [f"{at.key}.src: {step.src} is not on this machine; it is checked when the run starts"]


def misfits(name: str, step: Import, plan: Plan) -> list[Problem]:
    """Returns problems that keep the source of the step ``name`` from loading into the model of ``plan``.

    Reads only the headers of files.
    """
    strategy = Path(step.strategy) if step.strategy else None
    try:
        specs = outline(Path(step.src), strategy)
    except (ValueError, OSError) as error:
        return [Problem(f"steps.{name}.src", error_text(error))]
    key, target = f"steps.{name}", strategy_of_plan(plan)
    return mismatches.problems(key, step.src, specs, step.names, target=target, strict=step.strict)


def run_on_files(step: Import, run: RunFiles) -> dict[str, float]:
    """Checks everything before it writes the checkpoint, which becomes the newest.

    It is encrypted with the run's key. If the run saved newer checkpoints in an earlier start, nothing is
    imported and the ranks resume, unless ``checkpoint.resume`` is never.
    """
    final = step_folder(run.checkpoints, 0)
    newest = None if run.job.checkpoint.resume == "never" else latest(run.checkpoints, run.trust)
    if newest is not None and newest != final:
        run.say(f"import: skipped, because the run already has {newest.name}")
        return {}
    if wrong := misfits(run.name, step, run.plan):
        raise RequestError(tuple(wrong))

    # Open the incoming tensors under our names; without ``strict``, leave out those that the model lacks.
    make_folder(run.checkpoints)
    target = strategy_of_plan(run.plan)
    strategy = Path(step.strategy) if step.strategy else None
    incoming = read_incoming(Path(step.src), to_ours(step.names), strategy=strategy, strict=step.strict)
    tensors, left_out = incoming.tensors, [*incoming.left]
    if not step.strict:
        left_out += [n for n in tensors.specs if n not in target.named]
        tensors = RenamedTensors(tensors, {n: n for n in tensors.specs if n in target.named})

    # Write the checkpoint of step 0, which is the newest from now on.
    key, state = run.trust.key, _state(run)
    done = import_tensors(_as_kept(tensors, target, run.say), final, target, state, overwrite=True, key=key)
    point(final, key)

    ranks = many(target.grid.size, "rank")
    size = bytes_text(done.bytes_written)
    run.say(f"import: {step.src} -> {final.name}, {many(len(target.entries), 'tensor')} on {ranks}, {size}")
    if left_out:
        run.say(f"import: left out, because this model has no such tensors: {', '.join(left_out)}")
    if incoming.others:
        run.say(f"import: left out, because they are not tensors: {', '.join(incoming.others)}")
    return {"saved_step": 0}


def _state(run: RunFiles) -> dict[str, object]:
    """Returns the checkpoint's content besides its tensors."""
    plan = run.plan
    return {
        "step": 0,
        "seed": plan.seed,
        "name": plan.name,
        "batch_size": plan.sizes.global_batch,
        "settings": dict(recorded(with_data_read(run.job), plan)),
        "results": {"saved_step": 0},
    }


def _as_kept(tensors: FullTensors, target: Strategy, say: Callable[[str], None]) -> FullTensors:
    """Casts tensors to the dtypes of the run, which ``train.precision`` determines; reports casts."""
    specs = tensors.specs
    into = differing(specs, {name: target.entries[first].spec for name, first in target.named.items()})
    pairs = Counter((specs[name].dtype, dtype) for name, dtype in into.items())
    for (old, new), count in pairs.items():
        kept = "all values kept" if exact(old, new) else "each value rounded to the nearest"
        say(f"import: {many(count, 'tensor')} cast from {old} to {new}, {kept}")
    return Cast(tensors, into)
