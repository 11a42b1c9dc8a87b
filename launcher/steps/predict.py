"""``predict``: writes the model's outputs for held-out samples, or for the inputs in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.errors import Problem, RunError, error_text
from launcher.job.schema.job import Job
from launcher.job.schema.paths import place
from launcher.job.schema.steps import Predict
from launcher.plan.plan import Plan
from launcher.plan.values.text import bytes_text, many
from launcher.steps.file_checks import FileChecks
from launcher.steps.inference import file_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from launcher.runtime.training.batches import Samples
    from launcher.runtime.training.session import Session


def check(step: Predict, at: FileChecks) -> list[Problem]:
    problems = []
    if step.inputs is not None:
        path = Path(step.inputs)
        problems += at.problems("inputs", lambda: file_inputs.specs(path))
    return [*problems, *at.unwritable("to", step.to, "file")]


def plan_problems(step: Predict, at: FileChecks, plan: Plan) -> list[Problem]:
    if step.inputs is None:
        return []
    problems = file_inputs.misfits(file_inputs.specs(Path(step.inputs)), plan)
    return [Problem(f"{at.key}.inputs", f"{step.inputs}: {text}") for text in problems]


def run_on_ranks(step: Predict, session: Session, job: Job) -> str:
    """Writes the outputs. Raises ``RunError`` if they cannot be written."""
    import torch.distributed as dist

    from launcher.steps.inference import output_file as file

    # determine which ranks write which samples
    sizes, feed, plan = session.plan.sizes, session.feed, session.plan
    source = feed.val if step.inputs is None else file_inputs.open_inputs(Path(step.inputs), len(plan.inputs))
    count = -(-len(source) // sizes.global_batch)
    count = count if step.batches is None else min(count, step.batches)
    samples = min(len(source), count * sizes.global_batch)
    parts = file.SampleParts(samples, sizes.global_batch // sizes.local_batch, sizes.local_batch)

    to = Path(place(step.to, str(session.folder)))
    folder = to.with_name(f"{to.name}.parts")
    if session.world.rank == 0:
        make_folder(folder)
    dist.barrier()

    # every rank computes, some write
    outputs = _outputs(session, source, count)
    try:
        if _writes(plan, session.world.rank):
            file.write_part(file.part_file(folder, feed.part), parts.count(feed.part), outputs)
        for _ in outputs:  # on ranks that do not write
            pass
        dist.barrier()
        if session.world.rank:
            return ""
        size = file.join_parts(folder, parts, to)
    except (OSError, ValueError) as error:
        raise RunError(f"predict: {error_text(error)}") from error
    return f"{to}: {many(samples, 'sample')} in {bytes_text(size)}"


def _outputs(session: Session, source: Samples, count: int) -> Iterator[Tensor]:
    """Yields this rank's outputs for each batch, without padding; yields nothing on ranks without outputs."""
    from launcher.runtime.training import loop

    for batch in session.feed.inputs_in_order(source, count, "predict"):
        loop.stop_if_requested(session)
        output = session.pipeline.predict(batch.inputs)
        if output is not None and batch.valid:
            yield output[: batch.valid]


def _writes(plan: Plan, rank: int) -> bool:
    """Returns true if this rank writes: tp rank 0 of the last stage; of the first if all get the output."""
    at = plan.sizes.grid.coords(rank)
    stage = 0 if plan.output_broadcast else plan.sizes.places[-1]
    return at["tp"] == 0 and at["pp"] == stage
