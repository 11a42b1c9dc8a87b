"""steps=[export]: writes a checkpoint for other programs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.checkpoint.cast import WIDTHS
from launcher.checkpoint.export_one_file import check_file, export
from launcher.checkpoint.foreign.hugging_face import (
    CONFIG,
    Pieces,
    check_beside,
    check_folder,
    model_type,
    named_dtype,
    read_hf,
    size_in_bytes,
    split,
    to_theirs,
    write_hf,
    written,
)
from launcher.checkpoint.foreign.lora_adapters import (
    WEIGHTS,
    Adapters,
    bases,
    check_peft,
    merged,
    ours,
    write_peft,
)
from launcher.checkpoint.foreign.names import from_ours, renamed
from launcher.checkpoint.layout.derive_strategy import sources, strategy_of_plan, strategy_to_load
from launcher.checkpoint.layout.strategy import Entry, Strategy, match, single
from launcher.checkpoint.manifest import unvouched
from launcher.checkpoint.read import Reader, open_checkpoint, read_rank
from launcher.checkpoint.store import check_apart
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.checkpoint.transform import Report
from launcher.errors import Problem, RunError
from launcher.job.schema.data import Chat, Text
from launcher.job.schema.job import Job
from launcher.job.schema.models import HuggingFace
from launcher.job.schema.steps import Evaluate, Export, Transform
from launcher.plan.plan import Plan
from launcher.plan.resolve.checkpoint import AVERAGED
from launcher.plan.resolve.encryption import Trust
from launcher.plan.values.module_names import listed
from launcher.plan.values.precision import COMPUTE, DTYPE, HALF
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import bytes_text, many
from launcher.plan.verbs import EXPORTED
from launcher.steps import transform
from launcher.steps.file_checks import FileChecks, Kind, RunFiles, RunPaths

if TYPE_CHECKING:
    from torch import Tensor, nn


GENERATION = ("generation_config.json",)
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""The file names that transformers reads; other files of a folder are not copied."""


def with_defaults(step: Export, job: Job) -> Export:
    """Returns ``step`` with defaults filled in: a transformers model is exported as a folder like its own."""
    if not isinstance(job.model, HuggingFace):
        return step
    path = Path(job.model.path)
    new: dict[str, Any] = {"format": step.format or "hf"}
    if new["format"] == "hf" and step.names is None:
        new["names"] = _names(path, weights=job.model.weights)
    if new["format"] == "hf" and not step.beside:
        new["beside"] = (*_there(path, GENERATION), *_tokenizer(path, job))
    return step.model_copy(update=new)


def _there(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(folder / name) for name in names if (folder / name).is_file())


def _tokenizer(path: Path, job: Job) -> tuple[str, ...]:
    """Returns the tokenizer files that encoded the run's text; for other data those of the model's folder."""
    if not isinstance(job.data, Text | Chat):
        return _there(path, TOKENIZER)
    if job.data.tokenizer_file is None:
        return ()  # bytes, or bpe of the text: transformers reads neither
    used = Path(job.data.tokenizer_file)
    if used.name != "tokenizer.json" or os.path.realpath(used.parent) == os.path.realpath(path):
        return _there(path, TOKENIZER)
    return _there(used.parent, TOKENIZER)


def _names(path: Path, *, weights: bool) -> Mapping[str, str] | None:
    """Returns the names of tensors in the model's folder."""
    try:
        return written(model_type(path), read_hf(path).specs if weights else ())
    except (ValueError, OSError):  # reported for model.path
        return None


def generated_files(step: Export, job: Job) -> tuple[str, ...]:
    """Returns the names of the files that are generated rather than copied."""
    copied = any(Path(p).name == CONFIG for p in step.beside)
    own = isinstance(job.model, HuggingFace) and step.format == "hf"
    return (CONFIG,) if own and not copied else ()


def split_as(step: Export, job: Job) -> object:
    """Returns the type of model whose folders store experts separately.

    Returns ``None`` if the user names the tensors.
    """
    own = isinstance(job.model, HuggingFace) and step.format == "hf" and step.names is None
    return model_type(Path(job.model.path)) if own and isinstance(job.model, HuggingFace) else None


def opens_by_itself(step: Export, job: Job) -> HuggingFace | None:
    """Returns the model that transformers should open from the export; ``None`` if it need not open it.

    ``step`` is the request's: with the user's own tensor names it is unknown who reads them.
    """
    separate = job.model.lora is not None and step.lora == "separate"
    full = with_defaults(step, job)
    if not isinstance(job.model, HuggingFace) or separate or full.format != "hf" or step.names is not None:
        return None
    return job.model


def dtype_of(step: Export, job: Job) -> Callable[[str, str], str]:
    """Returns the function from a tensor's name in the folder and its dtype to the dtype to write.

    ``steps.export.dtype`` decides; otherwise a transformers model gets the dtype of the tensor of that name
    in its folder, or the one that the folder's config names.
    """
    specs: Mapping[str, TensorSpec] = {}
    usual = None if step.dtype is None else COMPUTE[step.dtype]
    if usual is None and isinstance(job.model, HuggingFace) and step.format == "hf":
        path = Path(job.model.path)
        with suppress(ValueError, OSError):  # a folder with only a config
            specs = read_hf(path).specs
        common = Counter(spec.dtype for spec in specs.values() if spec.dtype in WIDTHS).most_common(1)
        usual = named_dtype(path) or next((name for name, _ in common), None)

    def new(name: str, dtype: str) -> str:
        known = specs[name].dtype if name in specs else usual
        return known if dtype in WIDTHS and known in WIDTHS else dtype

    return new


def texts(step: Export, job: Job, kept: str) -> dict[str, str]:
    """Returns files to generate: the config of the model as trained.

    ``kept``: the dtype of the run's weights.
    """
    if not isinstance(job.model, HuggingFace) or not generated_files(step, job):
        return {}
    from launcher.models.hugging_face import exported_config_json

    return {CONFIG: exported_config_json(job.model, dtype_of(step, job)("", kept))}


SUMS = ("float32", "float64")
"""Dtypes in which adapters are added to weights."""
EXACT = 1e-5
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The allowed difference between the losses of the written model and of the run."""


def check(step: Export, at: FileChecks) -> list[Problem]:
    unused = [*_unused(step, at)]
    step = with_defaults(step, at.job)
    problems = [*unused, *_own_problems(step, at)]
    if not problems and step.src is not None and at.here(step.src):
        src = Path(step.src)
        problems += at.problems(
            "names", lambda: check_names(step, at.job, step.src, open_checkpoint(src, at.trust).strategy)
        )
        problems += at.problems("src", lambda: check_source(step, src, at.trust))
    return problems


def _unused(step: Export, at: FileChecks) -> Iterator[Problem]:
    """Yields settings that have no effect on what is written."""
    if step.lora == "separate" and at.job.model.lora is None:
        yield Problem(f"{at.key}.lora", "separate: model.lora is null, so there are no adapters")
    if _apart(step, at.job):
        text = "separate adapters are written as PEFT's two files, with this model's names; remove this key"
        for key in ("format", "names", "beside", "dtype"):
            if value := getattr(step, key):
                yield Problem(f"{at.key}.{key}", f"{value}: {text}")


def _own_problems(step: Export, at: FileChecks) -> Iterator[Problem]:
    """Yields problems of each setting by itself."""
    yield from at.problems("names", lambda: renamed((), from_ours(step.names)))
    yield from at.problems("max_shard_size", lambda: size_in_bytes(step.max_shard_size))
    kind: Kind = "folder" if step.format == "hf" or _apart(step, at.job) else "file"
    inside = at.problems("path", lambda: check_place(step, at.job))
    yield from inside or at.unwritable("path", step.path, kind)
    along = [Path(p) for p in step.beside if not at.later(p)]
    yield from at.problems("beside", lambda: check_beside(along))
    if step.src is not None and at.here(step.src):
        src = Path(step.src)
        yield from at.problems("src", lambda: open_checkpoint(src, at.trust))


def plan_problems(step: Export, at: FileChecks, plan: Plan) -> list[Problem]:
    """Returns problems of a name table that does not fit the run.

    There are none if a transform brings other tensors.
    """
    elsewhere = any(isinstance(s, Transform) and s.src is not None for s in at.job.steps.values())
    if at.shown or elsewhere:
        return []
    if step.src is not None:
        return [*_of_another_model(step, at, plan), *_unmerged(step, at, plan)]
    step = with_defaults(step, at.job)
    problems = at.problems("names", lambda: check_names(step, at.job, "the run", strategy_of_plan(plan)))
    return [*problems, *_unmerged(step, at, plan)]


def _of_another_model(step: Export, at: FileChecks, plan: Plan) -> Iterator[Problem]:
    """Yields problems of a checkpoint whose model is not that of this request."""
    if step.src is None or not at.here(step.src):
        return
    strategy, key = open_checkpoint(Path(step.src), at.trust).strategy, f"{at.key}.src"
    if why := _unlike_config(step, at.job, strategy, plan):
        yield Problem(key, f"{step.src} {why}")
        return
    if step.check and (why := _difference(strategy, plan)):
        text = f"{step.src} belongs to another model than this request, so they cannot be compared: {why}"
        own = at.job.run_dir is not None and Path(step.src).parent == Path(at.job.run_dir) / "checkpoints"
        yield Problem(key, text, "" if own else f"{at.key}.check=false")


def _unlike_config(step: Export, job: Job, strategy: Strategy, plan: Plan) -> str:
    """Returns why nobody could open the export.

    Its config describes the request's model, not the checkpoint's.
    """
    model, full = job.model, with_defaults(step, job)
    if not isinstance(model, HuggingFace) or not (_apart(full, job) or generated_files(full, job)):
        return ""
    why = _difference(strategy, plan, dtypes=False)
    text = f"belongs to another model than {model.path}, whose config the export would have"
    return f"{text}; name that model in model.path and model.config: {why}" if why else ""


def _difference(strategy: Strategy, plan: Plan, *, dtypes: bool = True) -> str:
    """Returns how the weights of a checkpoint differ from those of the planned model; "" if they do not."""
    ours, target = strategy.only("param", "buffer"), strategy_to_load(plan, strategy.named)
    if not dtypes:
        ours, target = (
            replace(s, entries={n: replace(e, dtype="float32") for n, e in s.entries.items()})
            for s in (ours, target)
        )
    try:
        match(ours, target)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def _unmerged(step: Export, at: FileChecks, plan: Plan) -> Iterator[Problem]:
    """Yields problems of weights that an adapter cannot be added to."""
    if at.job.model.lora is None or step.lora == "separate":
        return
    placed = {p.name: p for p in plan.params}
    key, cure = f"{at.key}.lora", f"{at.key}.lora=separate"
    for name, module in bases(strategy_of_plan(plan)).items():
        weight = placed[name]
        if len(weight.names) != len(placed[f"{module}.lora_A"].names):
            others = [n for n in weight.names if n != f"{module}.weight"]
            text = f"merged: {module}.weight shares its tensor with {others[0]}, which would change too"
            yield Problem(key, text, cure)
        elif weight.spec.dtype not in (*SUMS, *(HALF if plan.dtypes.mixed else ())):
            text = f"merged: {module}.weight is {weight.spec.dtype}; only {' and '.join(SUMS)} can be merged"
            yield Problem(key, text, cure)


def run_on_files(step: Export, run: RunFiles) -> dict[str, float]:
    """Writes the export; returns the loss of what was written, if it is checked."""
    requested, step, path = step, with_defaults(step, run.job), export_folder(run)
    make_folder(path.parent)
    figures: dict[str, float] = {}
    lines: list[str] = []
    src = source(step, run)
    if why := _unlike_config(requested, run.job, open_checkpoint(src, run.trust).strategy, run.plan):
        raise RunError(f"export: {src} {why}")

    def judge(new: Path) -> None:
        if itself := opens_by_itself(requested, run.job):
            from launcher.steps.model import exported_folder

            exported_folder.check_settings(itself, new)
        if step.check:
            figures.update(_compared(step, run, new, itself, say=lines.append))

    done = _write(step, run, path, judge)
    files = f" in {many(done.files, 'file')}" if step.format == "hf" else ""
    clear = ", not encrypted" if run.job.checkpoint.encrypt is not None else ""
    doubt = unvouched(src, run.trust)
    run.say(f"export: {path}, {bytes_text(done.bytes_written)}{files}{clear}{doubt}")
    for line in lines:
        run.say(line)
    return figures


def _compared(
    step: Export, run: RunFiles, new: Path, itself: HuggingFace | None, *, say: Callable[[str], None]
) -> dict[str, float]:
    """Returns the loss of what was written to ``new``, and its difference from the run's.

    ``itself``: the model that transformers must get when it opens the folder. Raises ``RunError`` if a
    difference is too large.
    """
    from launcher.steps.model import evaluate_in_one_process, exported_folder, weights_in_one_process

    job, before, terms = run.job, run.figures, run.plan.loss_terms
    there = read(run, new)
    made = weights_in_one_process.with_values(_exported_job(step, job), there)
    if itself is not None:
        exported_folder.check_logits(made, itself, job, new)
    trained = {} if _merged(step, job) else _trained(step, run)
    if dtypes := _check_rounding(trained, there):
        # the run's loss is that of the weights before rounding
        made = weights_in_one_process.with_values(job, trained)
        say(f"export: weights are rounded once, to the nearest {dtypes} value (steps.export.dtype)")
    of = AVERAGED if step.weights == "ema" else ""
    evaluated = f"val_loss{of}" in before and before.get(f"val_step{of}") == before.get("saved_step")
    if not evaluated or not _is_newest(step, run):
        loss = evaluate_in_one_process.held_out_loss(made, job, 1, terms)  # only shows that it runs
        alone = "not compared: no 'evaluate' used these weights"
        say(f"export: validation loss {loss:.6f} of one batch in one process ({alone})")
        return {"exported_loss": loss}

    loss = evaluate_in_one_process.held_out_loss(made, job, _batches(job), terms)

    was = before[f"val_loss{of}"]
    gap = abs(loss - was)
    allowed = _tolerance(step, run.job) * terms
    if not gap <= allowed:
        text = f"export: {export_folder(run)} would have validation loss {loss:.8f}, the run had {was:.8f}"
        raise RunError(f"{text}: they differ by {gap:.1e}, allowed {allowed:.0e} (steps.export.tolerance)")
    say(f"export: validation loss {loss:.6f} in one process, which differs by {gap:.1e} from the run's")
    return {"exported_loss": loss, "export_gap": gap}


def _is_newest(step: Export, run: RunFiles) -> bool:
    """Returns true if the step exports the run's newest checkpoint, to which the recorded loss belongs."""
    if step.src is None:
        return True
    src = source(step, run).absolute()
    return src.parent == run.checkpoints.absolute() and src == run.last().absolute()


def _check_rounding(trained: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> str:
    """Returns the dtypes to which weights were rounded, as text; empty if none was rounded.

    Raises ``RunError`` unless each written value is the trained one, rounded once.
    """
    rounded = {n: t for n, t in there.items() if n in trained and trained[n].dtype != t.dtype}
    for name, tensor in rounded.items():
        nearest = trained[name].to(tensor.dtype)
        if not ((nearest == tensor) | (nearest.isnan() & tensor.isnan())).all():
            text = f"export: {name} differs from the checkpoint's value rounded to {tensor.dtype}"
            cure = "export again, and if that fails too, check the checkpoint with steps=[verify]"
            raise RunError(f"{text}: a file was damaged while it was written or read; {cure}")
    return listed(sorted({str(t.dtype).removeprefix("torch.") for t in rounded.values()}))


def _trained(step: Export, run: RunFiles) -> dict[str, Tensor]:
    """Returns the tensors of the checkpoint that is exported."""
    from launcher.runtime.training.checkpoint_tensors import unpacked

    src = source(step, run)
    checkpoint = open_checkpoint(src, run.trust)
    read_from = sources(src, checkpoint.strategy, step.weights == "ema")
    tensors = read_rank(checkpoint, single(checkpoint.strategy), 0)
    return {name: unpacked(tensors[own]) for name, own in read_from.items()}


def _merged(step: Export, job: Job) -> bool:
    """Returns true if adapters are added to their base weights."""
    return job.model.lora is not None and not _apart(step, job)


def _tolerance(step: Export, job: Job) -> float:
    """Returns the allowed difference of losses.

    For merged adapters it is one rounding to half precision, if it occurs.
    """
    if step.tolerance is not None:
        return step.tolerance
    if not _merged(step, job):
        return EXACT
    written = dtype_of(step, job)("", "float32")
    return max(ROUNDING.get(name, EXACT) for name in (COMPUTE[job.train.precision], written))


def export_folder(run: RunPaths) -> Path:
    """Returns the path that this step writes to; each step has its own."""
    step, other = _step(run), run.suffix(EXPORTED)
    if step.path:
        return Path(step.path)
    if _apart(step, run.job):
        return run.folder / "exports" / f"adapter{other}"
    return run.folder / "exports" / (f"hf{other}" if step.format == "hf" else f"model{other}.safetensors")


def source(step: Export, run: RunFiles) -> Path:
    """Returns the checkpoint that the step names, else that of an earlier transform or the run's newest."""
    if step.src is not None:
        return run.source(step.src)
    return transform.transformed(run) or run.last()


def check_place(step: Export, job: Job) -> None:
    """Raises as ``run_on_files`` does if the named destination is not usable. Writes nothing."""
    if step.path is not None and _apart(step, job):
        return check_peft(Path(step.path), step.overwrite)
    if step.path is not None and step.format != "hf":
        check_file(Path(step.path))
    if step.path is not None and step.format == "hf":
        along = (*map(Path, step.beside), *map(Path, generated_files(step, job)))
        check_folder(Path(step.path), along, step.overwrite)


def check_source(step: Export, src: Path, trusted: Trust) -> None:
    """Raises as ``run_on_files`` does if file headers in ``src`` show a problem. Writes nothing."""
    if step.path is not None and step.format == "hf":
        check_apart(src, Path(step.path))
    reader = Reader(open_checkpoint(src, trusted))
    sources(src, reader.checkpoint.strategy, step.weights == "ema")
    reader.check_headers()


def check_names(step: Export, job: Job, src: object, strategy: Strategy) -> None:
    """Raises as ``run_on_files`` does if the name table does not fit the tensors of ``strategy``."""
    if step.format == "hf" and not _apart(step, job):
        to_theirs(src, _entries(job, strategy), from_ours(step.names))


def _entries(job: Job, strategy: Strategy) -> Mapping[str, Entry]:
    """Returns the tensors of ``strategy`` that are written."""
    adapters = _adapters(job)
    return strategy.only("param", "buffer").entries if adapters is None else merged(strategy, adapters)


def _adapters(job: Job) -> Adapters | None:
    lora = job.model.lora
    return None if lora is None else Adapters(lora.rank, lora.alpha, wide=DTYPE[job.train.precision])


def _apart(step: Export, job: Job) -> bool:
    """Returns true if only adapters are written."""
    return job.model.lora is not None and step.lora == "separate"


def exported(run: RunFiles) -> nn.Module:
    """Returns the model that the last earlier ``export`` has written, in one process."""
    from launcher.steps.model import weights_in_one_process

    made = run.maker(EXPORTED)
    assert made is not None, "the planner requires an export before a step that reads its result"
    at = replace(run, name=made[0])
    return weights_in_one_process.with_values(_exported_job(_step(at), run.job), read(at, export_folder(at)))


def _exported_job(step: Export, job: Job) -> Job:
    """Returns the job whose model the written weights fit: without adapters if they are merged."""
    if job.model.lora is None or _apart(step, job):
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"lora": None})})


def read(run: RunFiles, path: Path) -> Mapping[str, Tensor]:
    """Returns the tensors that this step wrote to ``path``, under our names.

    The format's own library reads them.
    """
    from safetensors.torch import load_file

    step = _step(run)
    if _apart(step, run.job):
        return _with_base(run, {ours(name): t for name, t in load_file(path / WEIGHTS).items()})
    if step.format != "hf":
        return load_file(path)
    entries = _entries(run.job, open_checkpoint(source(step, run), run.trust).strategy)
    back = {theirs: name for name, theirs in renamed(entries, from_ours(step.names)).names.items()}
    there = {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    for name, parts in split(split_as(step, run.job), {n: entries[back[n]].spec for n in back}).items():
        there[name] = _one(there, parts, entries[back[name]].spec.shape)
    return {back[name]: t for name, t in there.items() if name in back}


def _one(there: dict[str, Tensor], parts: Pieces, shape: tuple[int, ...]) -> Tensor:
    """Returns the model's tensor that was written in ``parts``."""
    out = there[next(iter(parts))].new_empty(shape)
    for piece, box in parts.items():
        out[tuple(map(slice, box.lo, box.hi))] = there[piece]
    return out


def _with_base(run: RunFiles, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the written adapters together with the base weights of their checkpoint."""
    from launcher.runtime.training.checkpoint_tensors import unpacked

    checkpoint = open_checkpoint(source(_step(run), run), run.trust)
    blobs = read_rank(checkpoint, single(checkpoint.strategy), 0, kinds=("param", "buffer"))
    return {n: unpacked(b) for n, b in blobs.items() if n not in adapters} | dict(adapters)


def _step(run: RunPaths) -> Export:
    step = run.job.steps[run.name]
    assert isinstance(step, Export)
    return with_defaults(step, run.job)


def _write(step: Export, run: RunFiles, path: Path, judge: Callable[[Path], None]) -> Report:
    src, trusted, adapters = source(step, run), run.trust, _adapters(run.job)
    averaged = step.weights == "ema"
    if adapters is not None and step.lora == "separate":
        base = run.job.model.path if isinstance(run.job.model, HuggingFace) else None
        overwrite = step.overwrite or step.path is None
        return write_peft(
            src, path, adapters, base, overwrite=overwrite, trust=trusted, averaged=averaged, judge=judge
        )
    if step.format != "hf":
        return export(src, path, trusted, averaged, adapters, dtype_of(step, run.job), judge)
    own = step.path is None  # a folder of this run, which a second start may overwrite
    return write_hf(
        src,
        path,
        names=from_ours(step.names),
        max_shard_size=step.max_shard_size,
        overwrite=step.overwrite or own,
        beside=tuple(map(Path, step.beside)),
        texts=texts(step, run.job, run.plan.dtypes.kept),
        trust=trusted,
        averaged=averaged,
        adapters=adapters,
        split_as=split_as(step, run.job),
        dtype_of=dtype_of(step, run.job),
        judge=judge,
    )


def _batches(job: Job) -> int | None:
    """Returns the number of batches of the run's own last evaluation."""
    return next(
        (s.batches for s in reversed(job.steps.values()) if isinstance(s, Evaluate) and s.of == "run"), None
    )
