"""Refuses layouts in which a user's optimizer class would compute other updates than in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.cut_model import CutModel
from launcher.plan.sizes import Sizes
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.note import Note
from launcher.plan.values.optimizer import OptimizerTraits
from launcher.plan.values.text import some

KEY = "optim._target_"
SEEN = "(seen on small tensors)"
WHOLE = "Use stages and replicas, where every rank has full tensors, or keep tensors of the parameter's shape"


def problems(job: Job, traits: OptimizerTraits | None, model: CutModel, graph: Graph) -> Iterator[Problem]:
    """Yields every reason why the optimizer cannot train in this layout, or resume from a checkpoint."""
    if traits is None:
        return
    if traits.broken:
        yield Problem(KEY, f"{traits.name}: {traits.broken}")
        return

    # an optimizer that draws random numbers trains on one rank, where nothing is cut
    trained = [p for p in model.params if p.trainable and not p.buffer]
    yield from _draws(job, traits, model.sizes)
    if not traits.draws:
        yield from _cut(job, traits, trained)
        yield from _apart(traits, trained)
        yield from _empty(traits, trained, model.sizes)
    yield from _unused(traits, trained, graph)

    # a checkpoint must contain everything that a resumed run needs
    if keeps(job) and traits.draws != "elsewhere":
        yield from _saved(traits, trained)


def keeps(job: Job) -> bool:
    """Returns true if the request saves the optimizer's state or resumes from it."""
    kinds = {step.kind for step in job.steps.values()}
    resumes = job.checkpoint.resume not in ("auto", "never")
    return bool(kinds & {"save", "load", "broadcast"}) or job.checkpoint.every is not None or resumes


def note(traits: OptimizerTraits | None) -> list[Note]:
    """Returns a note on what the optimizer did in the dry run on small tensors."""
    if traits is None or traits.broken:
        return []
    unit = "each element of a tensor by itself" if traits.elements else "one full tensor at a time"
    if not traits.alone:
        unit = "all tensors together"
    more = "; it draws random numbers from torch" if traits.draws else ""
    return [Note(KEY, f"{traits.name} updates {unit} {SEEN}{more}")]


def _draws(job: Job, traits: OptimizerTraits, sizes: Sizes) -> Iterator[Problem]:
    """Yields a problem if the optimizer draws random numbers that this request cannot repeat."""
    text = f"{traits.name}: it draws random numbers {SEEN}"
    if traits.draws == "elsewhere":
        yield Problem(
            KEY, f"{text} from a generator that torch.manual_seed does not seed, so no run could be repeated"
        )
    elif traits.draws and sizes.grid.size > 1:
        others = f"{sizes.grid.size} ranks would draw other numbers than one process; use one rank"
        yield Problem(KEY, f"{text}, and {others}")
    elif traits.draws and any(step.kind == "certify" for step in job.steps.values()):
        yield Problem(KEY, f"{text}, so two trainings cannot be compared: leave out the certify step")


def _cut(job: Job, traits: OptimizerTraits, trained: Sequence[Placed]) -> Iterator[Problem]:
    """Yields a problem for tensors that are cut although their update depends on the full tensor."""
    wrong = [p for p in trained if p.layout.axes and not _exact(traits, p)]
    if not wrong:
        return
    axes = sorted({axis for p in wrong for axis in p.layout.axes})
    names = some([p.name for p in wrong])
    text = (
        f"{traits.name}: its update of one element of a tensor depends on the rest of "
        f"the tensor {SEEN}, and {names} would be cut over {' and '.join(axes)}; it "
        "can be used with pipeline stages and replicas, where every rank has full "
        "tensors"
    )
    yield Problem(KEY, text, _unsharded(job, axes))


def _exact(traits: OptimizerTraits, p: Placed) -> bool:
    """Returns true if pieces of ``p`` get the same update as the full tensor."""
    return traits.rows if not any(p.layout.split[1:]) else traits.elements


def _unsharded(job: Job, axes: Sequence[str]) -> str:
    """Returns the override that replaces shards by replicas, if the request does not fix their number."""
    fixed = job.parallel.grid.dp_shard or job.parallel.grid.dp_replicate
    return "parallel.hsdp=null" if list(axes) == ["dp_shard"] and fixed is None else ""


def _apart(traits: OptimizerTraits, trained: Sequence[Placed]) -> Iterator[Problem]:
    """Yields a problem for tensors on different ranks if an update of one depends on all of them."""
    if traits.alone:
        return
    stages = {p.layout.at for p in trained}
    cut = sorted({axis for p in trained for axis in p.layout.axes})
    if len(stages) > 1 or cut:
        over = [*(["pipeline stages"] if len(stages) > 1 else []), *cut]
        text = (
            f"{traits.name}: its update of one tensor depends on other tensors {SEEN}, "
            f"and over {' and '.join(over)} no rank has all of them; it can be used with "
            "replicas, where every rank has all tensors"
        )
        yield Problem(KEY, text)


def _empty(traits: OptimizerTraits, trained: Sequence[Placed], sizes: Sizes) -> Iterator[Problem]:
    """Yields a problem for pieces without elements, if the optimizer fails on them."""
    if traits.empty or not traits.rows:
        return
    bare = [p.name for p in trained if p.layout.axes and _empty_somewhere(p, sizes)]
    if bare:
        text = f"{traits.name}: it fails on a piece without elements {SEEN}"
        text += f", and some ranks have no elements of {some(bare)}"
        yield Problem(KEY, text, "parallel.hsdp.uneven=whole")


def _empty_somewhere(p: Placed, sizes: Sizes) -> bool:
    """Returns true if the piece of ``p`` on some rank has no elements."""
    boxes = (p.layout.box(rank) for rank in range(sizes.grid.size))
    return any(box is not None and box.empty for box in boxes)


def _unused(traits: OptimizerTraits, trained: Sequence[Placed], graph: Graph) -> Iterator[Problem]:
    """Yields a problem for parameters that get no gradient, if the optimizer fails on them."""
    never = {name for name, scope in graph.scopes if scope is None}
    idle = [p.name for p in trained if never.intersection(p.names)]
    if idle and not traits.unused:
        text = f"{traits.name}: it fails on a parameter without a gradient {SEEN}"
        yield Problem(
            KEY, f"{text}, and no forward uses {some(idle)}; freeze them, or let step() skip a grad of None"
        )


def _saved(traits: OptimizerTraits, trained: Sequence[Placed]) -> Iterator[Problem]:
    """Yields a problem for state that a checkpoint could not restore."""
    cut = [p.name for p in trained if p.layout.axes]
    if traits.lost:
        text = f"{traits.name}: its state cannot be saved and restored: {traits.lost} {SEEN}"
        yield Problem(KEY, f"{text}. Keep numbers and tensors in self.state[p] or in self.param_groups")
    elif traits.odd and cut:
        text = f"{traits.name}: it keeps {traits.odd}"
        yield Problem(KEY, f"{text}, which cannot be saved for parameters that are cut: {some(cut)}. {WHOLE}")
