"""``transform``: converts a checkpoint to the layout that the step names, without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.checkpoint.foreign.import_checkpoint import is_foreign, open_source_and_layout, to_checkpoint
from launcher.checkpoint.foreign.one_file_per_rank import (
    RankFormat,
    check_free_for_ranks,
    check_rank_places,
    to_rank_files,
    writer,
)
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.layout.derive_strategy import (
    strategy_of_plan,
    target_strategy,
    with_left_out_tensors,
)
from launcher.checkpoint.layout.strategy import Strategy, match, tensor_specs
from launcher.checkpoint.manifest import unvouched
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.store import check_destination
from launcher.checkpoint.transform import Report, check_places, is_checkpoint, plan_transform, transform
from launcher.errors import Problem, refuse
from launcher.job.schema.steps import Transform
from launcher.optional import lacking, mindspore
from launcher.plan.plan import Plan
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.text import bytes_text, many
from launcher.plan.verbs import TRANSFORMED, reads_best
from launcher.steps.file_checks import FileChecks, RunFiles, RunPaths

PREFIX = "checkpoint_"
"""The default prefix of rank file names."""


def check(step: Transform, at: FileChecks) -> list[Problem]:
    if step.format != "launcher" and (lacks := lacking("mindspore", f"{at.key}.format")):
        return lacks
    problems = [*_place_problems(step, at), *_file_problems(step, at)]
    named = (step.src, step.strategy, step.src_strategy)
    if not problems and step.src is not None and not any(map(at.later, named)):
        src = Path(step.src)
        key = "src" if step.strategy is None else "strategy"
        problems = at.problems(key, lambda: check_heads(step, src, at.trust))
    return problems


def _place_problems(step: Transform, at: FileChecks) -> list[Problem]:
    """Returns problems of the destination."""
    if step.dst is None:
        return []
    dst = Path(step.dst)
    inside = at.problems("dst", lambda: check_free(step, dst) if step.src is None else check_place(step, dst))
    return inside or at.unwritable("dst", step.dst, "folder")


def _file_problems(step: Transform, at: FileChecks) -> list[Problem]:
    """Returns problems of each input by itself."""
    problems: list[Problem] = []
    if step.src is not None and at.here(step.src):
        src = Path(step.src)
        problems += at.problems("src", lambda: check_source(step, src, at.trust))
    if at.here(step.strategy):
        problems += at.problems("strategy", lambda: open_strategy("strategy", step.strategy))
    if at.here(step.src_strategy):
        problems += at.problems("src_strategy", lambda: open_strategy("src_strategy", step.src_strategy))
    return problems


def plan_problems(step: Transform, at: FileChecks, plan: Plan) -> list[Problem]:
    """Returns problems of a layout that the run's own checkpoint cannot be converted to."""
    if step.src is not None or step.strategy is not None:
        return []
    return at.problems("tp", lambda: target(step, strategy_of_plan(plan)))


def preview(step: Transform, at: FileChecks) -> list[str]:
    """Returns what the step will read and write, if the checkpoint exists; writes nothing.

    Raises ``RequestError``.
    """
    if step.src is None or reads_best(step):
        return []
    src, lines = Path(step.src), list[str]()
    refuse(at.problems("src", lambda: lines.append(transfer(step, src, at.trust))))
    return lines


def run_on_files(step: Transform, run: RunFiles) -> dict[str, float]:
    src, job = run.source(step.src), run.job
    own = step.dst is None  # a folder of this run, which a second start may overwrite
    step = step.model_copy(update={"overwrite": step.overwrite or own})
    done = rewrite(step, src, written(run), key=job.checkpoint.encrypt, trust=run.trust)

    # report the result
    ranks = step.strategy if step.strategy is not None else many(step.nproc, "rank")
    doubt = unvouched(src, run.trust) if is_checkpoint(src) else ""
    files = "" if step.format == "launcher" else f" in .{step.format} files"
    clear = ", not encrypted" if files and job.checkpoint.encrypt is not None else ""
    size = bytes_text(done.bytes_written)
    run.say(f"transform: {src.name} -> {ranks}, {size}{files}{clear}, {done.path}{doubt}")
    if done.left:
        run.say(f"transform: left out, because they are not tensors: {', '.join(done.left)}")
    return {}


def written(run: RunPaths) -> Path:
    """Returns the path that this step writes to; each step has its own."""
    step = run.job.steps[run.name]
    assert isinstance(step, Transform)
    return Path(step.dst) if step.dst else run.folder / f"transformed{run.suffix(TRANSFORMED)}"


def transformed(run: RunFiles) -> Path | None:
    """Returns the path that the last earlier ``transform`` has written."""
    made = run.maker(TRANSFORMED)
    return None if made is None else written(replace(run, name=made[0]))


def target(step: Transform, src: Strategy) -> Strategy:
    """Returns the requested layout.

    It is the strategy file's, which must fit ``src``, or that of the step's other keys.
    """
    if step.strategy is None:
        return _in_words(step, src)
    requested = open_strategy("steps.transform.strategy", step.strategy)
    assert requested is not None
    try:
        to = with_left_out_tensors(mindspore.of_full_tensors(requested, tensor_specs(src)), src)
        match(src, to)
    except ValueError as error:
        raise ValueError(f"{step.strategy}: {error}") from error
    return to


def rewrite(step: Transform, src: Path, dst: Path, key: str | None = None, trust: Trust = ANYONE) -> Report:
    """Converts ``src``, a checkpoint or what ``import`` reads, to ``dst``.

    ``dst`` is complete on return or does not exist. ``key`` encrypts a written checkpoint; rank files are not
    encrypted.
    """
    foreign, overwrite, workers = step.src_strategy, step.overwrite, step.workers
    if step.format != "launcher":
        form = RankFormat(step.format, step.prefix or PREFIX)
        how = _to(step, src)
        return to_rank_files(
            src, dst, how, form, strategy=foreign, overwrite=overwrite, workers=workers, trust=trust
        )
    if is_foreign(src, foreign):
        how = _to(step, src)
        return to_checkpoint(src, dst, how, foreign, overwrite=overwrite, key=key, workers=workers)
    to = target(step, _ours(step, src, trust))
    return transform(src, dst, to, overwrite=overwrite, key=key, workers=workers, trust=trust)


def check_place(step: Transform, dst: Path) -> None:
    """Raises as ``rewrite`` does if the named destination is unusable for its source. Writes nothing."""
    check = check_places if step.format == "launcher" else check_rank_places
    check(Path(str(step.src)), dst, step.overwrite)


def check_free(step: Transform, dst: Path) -> None:
    """Like ``check_place``, without knowing the source."""
    if step.format == "launcher":
        check_destination(dst, step.overwrite, is_checkpoint, "checkpoint")
    else:
        check_free_for_ranks(dst, step.overwrite)


def check_source(step: Transform, src: Path, trust: Trust) -> None:
    """Raises for a source that is neither a checkpoint nor readable by ``import``."""
    if not is_foreign(src, step.src_strategy):
        _ours(step, src, trust)


def check_heads(step: Transform, src: Path, trust: Trust) -> None:
    """Raises as ``rewrite`` does if file headers in ``src`` show a problem. Writes nothing."""
    if step.format != "launcher":
        writer(src, _to(step, src), step.src_strategy, trust=trust, verify=False)
    elif is_foreign(src, step.src_strategy):
        open_source_and_layout(src, _to(step, src), step.src_strategy, verify=False)
    else:
        checkpoint = open_checkpoint(src, trust)
        target(step, checkpoint.strategy)
        Reader(checkpoint).check_headers()


def transfer(step: Transform, src: Path, trust: Trust) -> str:
    """Returns what ``rewrite`` would read and write; writes nothing. Raises as it does."""
    if step.format == "launcher" and not is_foreign(src, step.src_strategy):
        to = target(step, _ours(step, src, trust))
        plan = plan_transform(src, to, workers=step.workers, trust=trust)
        return f"{plan.text()}{plan.detail()}".removesuffix("\n")
    check_heads(step, src, trust)
    after = writer(src, _to(step, src), step.src_strategy, trust=trust, verify=False).after
    size = bytes_text(sum(e.spec.nbytes for e in after.entries.values()))
    kind = "a checkpoint" if step.format == "launcher" else f".{step.format} files"
    return f"{src}: {many(len(after.entries), 'tensor')}, {size} -> {kind} of {many(after.grid.size, 'rank')}"


def _ours(step: Transform, src: Path, trust: Trust) -> Strategy:
    strategy = open_checkpoint(src, trust).strategy
    if step.src_strategy is not None:
        raise ValueError(
            f"{src}: a checkpoint of this launcher, which records its layout; remove src_strategy"
        )
    return strategy


def _to(step: Transform, src: Path) -> mindspore.StrategyInput | mindspore.Layouts:
    """Returns the requested strategy file for a foreign source, else a function of the source's layout.

    A MindSpore strategy may describe one stage or all of them; the source shows which.
    """
    requested = open_strategy("strategy", step.strategy)
    if requested is None or not is_foreign(src, step.src_strategy):
        return lambda strategy: target(step, strategy)
    return requested


def _in_words(step: Transform, src: Strategy) -> Strategy:
    return target_strategy(src, nproc=step.nproc, stages=step.stages, shard_size=step.shard_size, tp=step.tp)
