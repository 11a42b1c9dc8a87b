"""steps=[predict]: its inputs and outputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.checkpoint.tensorfile.disk import sync
from launcher.checkpoint.tensorfile.safetensors import (
    Blob,
    FileWriter,
    blob_at,
    described,
    mapped,
    read_header,
    write_stream,
)
from launcher.errors import Problem, RunError, said
from launcher.job.schema.base import RUN, place
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Predict
from launcher.plan.plan import Plan
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.text import bytes_text, listed, many
from launcher.runtime.training.state import blob, unpacked
from launcher.steps.file_checks import FileChecks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from launcher.runtime.training.batches import Samples
    from launcher.runtime.training.session import Session


def names(count: int) -> tuple[str, ...]:
    """Names of the tensors for a model with ``count`` inputs; a single one may have any name."""
    return tuple(f"input{i}" for i in range(count))


def specs(path: Path) -> dict[str, TensorSpec]:
    """The specs of all tensors in the file. Raises ``ValueError`` and ``OSError``."""
    return {name: slot.spec for name, slot in read_header(path).entries.items()}


def in_order(found: Mapping[str, TensorSpec], count: int) -> tuple[str, ...] | None:
    """The names in the file, in the order of the forward's arguments; ``None`` if they do not match."""
    if count == 1 and len(found) == 1:
        return tuple(found)
    return names(count) if {*found} == {*names(count)} else None


def misfits(found: Mapping[str, TensorSpec], plan: Plan) -> Iterator[str]:
    """Why these tensors are not inputs of the model of ``plan``."""
    wanted, mixed = plan.inputs, plan.observed.mixed
    order = in_order(found, len(wanted))
    if order is None:
        takes = f"the model takes {len(wanted)}: {', '.join(names(len(wanted)))}"
        yield f"has {', '.join(sorted(found)) or 'no tensor'}, and {takes}"
        return
    for name, want in zip(order, wanted, strict=True):
        has = found[name]
        floats = _floating(has) and _floating(want)
        if not has.shape or has.shape[1:] != want.shape[1:] or (has.dtype != want.dtype and not floats):
            sample = TensorSpec(want.shape[1:], want.dtype)
            yield f"{name} is {described(has)}, the model takes {described(sample)} a sample"
    if len({found[name].shape[:1] for name in order}) > 1:
        yield f"not as many samples of each: {', '.join(f'{n} {described(found[n])}' for n in order)}"
    elif found[order[0]].shape[:1] == (0,):
        yield "has no samples"
    elif mixed and found[order[0]].shape[0] % plan.sizes.micro_batch:
        text = f"{listed(mixed)} in evaluation mode too normalizes over the samples of a micro batch"
        yield f"{text}, some with padding: give a multiple of {plan.sizes.micro_batch} samples"


def _floating(t: TensorSpec) -> bool:
    return t.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True)
class GivenInputs:
    """Samples by index, read when they are requested."""

    path: Path
    order: tuple[str, ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def inputs(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """The inputs of these samples, in the order of ``indices``."""
        from safetensors import safe_open

        low, high = int(indices.min()), int(indices.max()) + 1
        with safe_open(self.path, framework="pt") as file:
            return tuple(file.get_slice(name)[low:high][indices - low] for name in self.order)

    def targets(self, indices: npt.NDArray[np.int64]) -> Tensor:
        raise NotImplementedError("inputs alone; nobody compares what becomes of them")


def given(path: Path, count: int) -> GivenInputs:
    """The inputs in a file without ``misfits``, for a model with ``count`` inputs."""
    found = specs(path)
    order = in_order(found, count)
    assert order is not None
    return GivenInputs(path, order, found[order[0]].shape[0])


def check(step: Predict, at: FileChecks) -> list[Problem]:
    problems = []
    if step.inputs is not None:
        path = Path(step.inputs)
        problems += at.problems("inputs", lambda: specs(path))
    if not step.to.startswith(RUN):
        problems += at.unwritable("to", step.to)
        if Path(step.to).is_dir():
            problems.append(Problem(f"{at.key}.to", f"{step.to} is a folder, and should be a file"))
    return problems


def fits(step: Predict, at: FileChecks, plan: Plan) -> list[Problem]:
    if step.inputs is None:
        return []
    problems = misfits(specs(Path(step.inputs)), plan)
    return [Problem(f"{at.key}.inputs", f"{step.inputs}: {text}") for text in problems]


def run_on_ranks(step: Predict, session: Session, job: Job) -> str:
    """Writes the outputs. Raises ``RunError`` if they cannot be written."""
    import torch.distributed as dist

    # determine which ranks write which samples
    sizes, feed, plan = session.plan.sizes, session.feed, session.plan
    source = feed.val if step.inputs is None else given(Path(step.inputs), len(plan.inputs))
    count = -(-len(source) // sizes.global_batch)
    count = count if step.batches is None else min(count, step.batches)
    samples = min(len(source), count * sizes.global_batch)
    parts = Parts(samples, sizes.global_batch // sizes.local_batch, sizes.local_batch)

    to = Path(place(step.to, str(session.folder)))
    folder = to.with_name(f"{to.name}.parts")
    if session.world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    # every rank computes, some write
    outputs = _outputs(session, source, count)
    try:
        if _writes(plan, session.world.rank):
            write_part(part_file(folder, feed.part), parts.count(feed.part), outputs)
        for _ in outputs:  # on ranks that do not write
            pass
        dist.barrier()
        if session.world.rank:
            return ""
        size = join(folder, parts, to)
    except (OSError, ValueError) as error:
        raise RunError(f"predict: {said(error)}") from error
    return f"{to}: {many(samples, 'sample')} in {bytes_text(size)}"


def _outputs(session: Session, source: Samples, count: int) -> Iterator[Tensor]:
    """Yields the outputs of this rank's part of each batch without padding; nothing if it has none."""
    from launcher.runtime.training import loop

    for batch in session.feed.inputs_in_order(source, count, "predict"):
        loop.look(session)
        output = session.pipeline.predict(batch.inputs)
        if output is not None and batch.valid:
            yield output[: batch.valid]


def _writes(plan: Plan, rank: int) -> bool:
    """Whether this rank writes its part: one rank of the last stage, or of the first if all have outputs."""
    at = plan.sizes.grid.coords(rank)
    stage = 0 if plan.output_broadcast else plan.sizes.places[-1]
    return at["tp"] == 0 and at["pp"] == stage


OUTPUT = "output"
"""The name of the tensor."""


@dataclass(frozen=True)
class Parts:
    """Assigns samples to data-parallel parts: each batch has ``parts`` parts of ``size`` samples.

    ``samples`` is the total; the last batch may be shorter.
    """

    samples: int
    parts: int
    size: int

    def rows(self) -> Iterator[tuple[int, int]]:
        """Yields part and number of samples, in the order of the samples."""
        left = self.samples
        while left:
            for part in range(self.parts):
                n = min(self.size, left)
                left -= n
                if n:
                    yield part, n

    def count(self, part: int) -> int:
        """The number of samples of one part."""
        return sum(n for p, n in self.rows() if p == part)


def part_file(folder: Path, part: int) -> Path:
    return folder / f"part{part:05d}.safetensors"


def write_part(path: Path, rows: int, outputs: Iterable[Tensor]) -> None:
    """Writes ``outputs`` with samples along dim 0, ``rows`` in total; no file if empty.

    Raises ``OSError``.
    """
    blobs = map(blob, outputs)
    first = next(blobs, None)
    if first is None:
        return
    spec = TensorSpec((rows, *first.shape[1:]), first.dtype)
    with FileWriter(path, {OUTPUT: spec}, {}) as file:
        at = file.header.entries[OUTPUT].start
        for piece in chain([first], blobs):
            file.write(at, piece.data)
            at += piece.data.nbytes
        assert at == file.header.entries[OUTPUT].stop, (at, rows)


def join(folder: Path, parts: Parts, to: Path) -> int:
    """Joins all parts into ``to`` and deletes them; returns its size. ``to`` appears only when complete."""
    files = {p: part_file(folder, p) for p in range(parts.parts) if parts.count(p)}
    blobs = {p: blob_at(mapped(path), read_header(path), OUTPUT) for p, path in files.items()}
    new = to.with_name(f"{to.name}.partial")
    try:
        _jsonl(new, parts, blobs) if to.suffix == ".jsonl" else _safetensors(new, parts, blobs)
        size = new.stat().st_size
        new.replace(to)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(to.parent)
    shutil.rmtree(folder)
    return size


def _pieces(parts: Parts, blobs: Mapping[int, Blob]) -> Iterator[Blob]:
    """Yields the parts' pieces in the order of the samples."""
    at = dict.fromkeys(blobs, 0)
    for part, n in parts.rows():
        whole = blobs[part]
        row = whole.data.nbytes // whole.shape[0]
        start = at[part]
        at[part] += n
        yield Blob.of(whole.dtype, (n, *whole.shape[1:]), whole.data[start * row : at[part] * row])


def _safetensors(path: Path, parts: Parts, blobs: Mapping[int, Blob]) -> None:
    first = next(iter(blobs.values()))
    spec = TensorSpec((parts.samples, *first.shape[1:]), first.dtype)
    write_stream(
        path,
        {OUTPUT: spec},
        lambda _: (p.data for p in _pieces(parts, blobs)),
        {"format": "pt"},
        digested=False,
    )


def _jsonl(path: Path, parts: Parts, blobs: Mapping[int, Blob]) -> None:
    """Writes one line per sample. Raises ``ValueError`` for values that JSON cannot represent."""
    rows = (row for piece in _pieces(parts, blobs) for row in unpacked(piece).to(_wide(piece)).tolist())
    with path.open("w") as file:
        for sample, row in enumerate(rows):
            try:
                line = json.dumps({"sample": sample, OUTPUT: row}, allow_nan=False)
            except ValueError:
                text = (
                    f"the output of sample {sample} has numbers that are not finite, which JSON does not have"
                )
                raise ValueError(f"{text}; write a .safetensors file") from None
            file.write(f"{line}\n")


def _wide(piece: Blob) -> torch.dtype:
    """A dtype that holds the values without loss; JSON then writes the shortest text that reads the same."""
    return torch.float64 if piece.dtype.startswith(("float", "bfloat")) else torch.int64
