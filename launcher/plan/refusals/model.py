"""Refuses models whose side effects a layout would change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Certify
from launcher.plan.cut.stages import covers
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.cut_model import CutModel
from launcher.plan.refusals.evaluation import evaluated_by
from launcher.plan.sizes import Sizes
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.model_graph import DUAL, Graph, Inner, ModelStructure, StateChange
from launcher.plan.values.module_names import listed, owner
from launcher.plan.values.note import Note
from launcher.plan.values.precision import DTYPE
from launcher.plan.values.recomputed_module import Recomputed
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many, some
from launcher.plan.verbs import verb

KEY = "model"
Why = tuple[str, str]
"""The reason, and an override to paste ("" if there is none)."""


def unfit(skeleton: ModelStructure) -> Iterator[Problem]:
    """Yields problems of a model that no layout can train; they are known before the model runs."""
    for p in skeleton.params:
        if p.name == p.same_as:
            yield from _dtype(p.name, p.spec, "buffer" if p.buffer else "parameter")

    synced = skeleton.traits.synced
    if synced:
        does = "SyncBatchNorm averages over all processes, including those of other stages and of tp"
        way_out = "use BatchNorm, whose statistics are those of each rank's own micro batch"
        yield Problem(KEY, f"{listed(synced)}: {does}; {way_out}")

    for names in skeleton.traits.shared:
        kept = [p for p in skeleton.params if p.name in names]
        if len(kept) > 1 and any(p.trainable for p in kept):
            together = listed([p.name for p in kept])
            text = f"{together} share memory, but ranks and checkpoints keep each in memory of its own"
            way_out = "keep one tensor, under one name or several, and create views of it in the forward"
            yield Problem(KEY, f"{text}; {way_out}")

    for hook in skeleton.traits.global_hooks:
        text = (
            f"the constructor calls {hook}, which registers a hook for all modules of "
            "the process: it would also run in the copies of the model that the launcher makes"
        )
        yield Problem(KEY, f"{text}; register hooks on the modules of the model")

    if not any(p.trainable for p in skeleton.params):
        text = "none of its parameters requires a gradient, so there is nothing to train"
        yield Problem(KEY, f"{text}; leave requires_grad on for parameters that should train")


def _dtype(name: str, spec: TensorSpec, kind: str) -> Iterator[Problem]:
    """Yields a problem if training or checkpoints do not support the dtype."""
    if spec.dtype.startswith("complex") and kind == "parameter":
        text = (
            f"{name} is a parameter of {spec.dtype}, which optimizers, norms and sharding do not support here"
        )
        way_out = (
            "store it as real numbers with a last dim of 2, and use torch.view_as_complex in the forward"
        )
        yield Problem(KEY, f"{text}; {way_out}")
    elif spec.dtype not in ITEMSIZE:
        text = f"{name} is a {kind} of {spec.dtype}, which checkpoints cannot store"
        cure = "; store it as real numbers with a last dim of 2" if spec.dtype.startswith("complex") else ""
        yield Problem(KEY, text + (cure or f"; use one of {', '.join(ITEMSIZE)}"))


def untrained(job: Job, skeleton: ModelStructure, graph: Graph) -> Iterator[Problem]:
    """Yields a problem if training would change nothing: no gradient leads from the output to a parameter."""
    trains = any(verb(step).trains or isinstance(step, Certify) for step in job.steps.values())
    if graph.detached and trains and any(p.trainable for p in skeleton.params):
        text = "the output of its forward does not require a gradient, so nothing would be trained"
        yield Problem(KEY, f"{text}; compute it without torch.no_grad(), detach() and .data")


def layout_problems(
    job: Job, at: CutModel, skeleton: ModelStructure, graph: Graph, recomputed: Sequence[Recomputed] = ()
) -> Iterator[Problem]:
    """Yields what this layout cannot train with the same result as one process."""
    alone = _alone(job, at.sizes)
    placed = {n: p for p in at.params for n in p.names}
    yield from _sparse(graph)
    if not at.mixed:
        yield from _disagree(job, at, graph)
    yield from _references(skeleton, graph)
    yield from _foreign_memory(skeleton, graph)

    yield from _around(at, skeleton, graph, alone)
    yield from _once(at, graph, recomputed)
    yield from _clocks(at, graph, recomputes=job.parallel.recompute is not None)

    # tensors that a forward changes, and gradients that it computes or reads itself
    for change in graph.effects.changes:
        p = placed.get(change.name)
        why = _changed(change, p, at, alone)
        if why:
            kind = "parameter" if p is not None and not p.buffer else "buffer"
            yield Problem(KEY, f"the forward changes the {kind} {change.name}{why[0]}", why[1])
    for inner in graph.effects.inner_gradients:
        why = _inner(inner, at)
        if why:
            how = "calls backward()" if inner.backward else "computes gradients itself (torch.autograd.grad)"
            yield Problem(KEY, f"{_where(inner.module)} {how}, and {why[0]}", why[1])
    yield from _borrowed(at, graph, placed)
    yield from _late(at, graph, placed)
    for module, name in skeleton.traits.references:
        stage, other = at.stage_of(module), at.stage_of(owner(name))
        if None not in (stage, other) and stage != other:
            text = f"{module} has a Python reference to {owner(name)} and shares its weight {name}"
            text += f", but they run on stages {stage} and {other}, each with a copy"
            yield Problem(KEY, f"{text}; keep only the weight, or put both modules on one stage")
    for c in (c for row in at.boundaries for c in row if c.name in graph.effects.late_gradients):
        text = f"whether {c.name} needs a gradient changes after many forwards, but a stage sends it either"
        text += " always with its gradient or never"
        cure = "keep the modules that make and use it on one stage, or change requires_grad of its weights"
        yield Problem(KEY, f"{text}; {cure}")
    for module in graph.effects.grad_reads:
        text = (
            f"{_where(module)} reads the .grad of a weight or buffer, but each rank has only its own "
            "part of the gradient, or none yet"
        )
        way_out = "compute what it needs in the forward (torch.autograd.grad), or remove the read"
        yield Problem(KEY, f"{text}; {way_out}")
    if graph.effects.early_grad_reads:
        yield from _early(at, graph.effects.early_grad_reads, alone)
    yield from _versions(at, graph, placed, alone)

    # code that would see less than in one process, or that torch does not support
    yield from _hooks(at, skeleton, placed, alone)
    yield from _twins(at, skeleton, placed)
    yield from _overwrites(at, graph)
    yield from _inputs(at, graph)
    yield from _left_values(at, graph)
    yield from _fused(job, at, skeleton)
    for c in (c for row in at.boundaries for c in row):
        if any(t.dtype.startswith("complex") for t in c.specs):
            how = "passes complex numbers from one stage to another, but their gradients cannot be sent back"
            text = f"{c.name} {how}"
            yield Problem(KEY, f"{text}; pass torch.view_as_real of it, or put both sides on one stage")


ALONE = "use one data-parallel rank"


def _alone(job: Job, sizes: Sizes) -> str:
    """Returns an override for one data-parallel rank, which has nothing to shard over."""
    requested = job.parallel.grid.model_dump(exclude_none=True)
    out = [f"launch.nproc={sizes.grid.size // sizes.replicas}"]
    out += [f"parallel.grid.{axis}=1" for axis in ("dp_replicate", "dp_shard") if requested.get(axis, 1) != 1]
    out += ["parallel.hsdp=null"] if job.parallel.hsdp is not None else []
    return " ".join(out)


def _around(at: CutModel, skeleton: ModelStructure, graph: Graph, alone: str) -> Iterator[Problem]:
    """Yields problems with values that differ between ranks, which would train different models."""
    n = at.sizes.grid.size
    asking = [f"the constructor asks for {query}" for query in skeleton.traits.world]
    places = (
        (f"{module} asks" if module else "the model asks", query) for module, query in graph.effects.world
    )
    asking += [f"{asks} for {query} in its forward" for asks, query in places]
    for asks in asking if n > 1 else ():
        text = f"{asks}, but {n} ranks get another answer than one process"
        cure = "remove it: the launcher combines samples, gradients and losses itself"
        yield Problem(KEY, f"{text}: they would train another model; {cure}")
    if graph.effects.global_draws and at.sizes.replicas > 1:
        text = "the forward draws numbers from Python's or numpy's random stream"
        yield Problem(KEY, f"{text}, which differs on every rank; draw with torch, inside a module")
    if _mixes(graph) and _cuts_batch(at.sizes):
        yield _mixed(at, graph)
    yield from _seeds(at, graph)
    for kept in graph.effects.carried:
        if kept.by_data and at.sizes.replicas > 1:
            ranks = f"each of {at.sizes.replicas} data-parallel ranks"
            text = f"the {kept.by} changes {kept.name} from rank-local data and then reads it"
            yield Problem(KEY, f"{text}: {ranks} would train another model; {ALONE}", alone)


def _run_once(at: CutModel, graph: Graph, recomputed: Sequence[Recomputed]) -> set[str]:
    """Returns the modules that the model's own checkpoint runs twice in a plain loop, but not in this layout.

    A stage runs modules without the code between them that calls checkpoint(), and a recomputed module inside
    of such a call restores its state after the second run.
    """
    several = len(at.stages) > 1
    again = [r.module for r in recomputed]
    return {
        name
        for name, caller in graph.checkpointed
        if (several and at.stage_of(caller) is None)
        or any(covers(m, name) and not covers(m, caller) for m in again)
    }


TWICE = "twice in each step of a plain loop, in the forward and again in the backward"
OWN_CHECKPOINT = "the model's own torch.utils.checkpoint"
PLAIN = "use parallel.recompute in place of that checkpoint: then every layout and a plain loop run it once"


def _once(at: CutModel, graph: Graph, recomputed: Sequence[Recomputed]) -> Iterator[Problem]:
    """Yields state that the model's own checkpoint changes twice in each step of a plain loop, and reads."""
    once = _run_once(at, graph, recomputed)
    state = [c.name for c in graph.effects.changes if c.read and once.intersection(c.at)]
    state += [k.name for k in graph.effects.carried if k.by == "forward" and owner(k.name) in once]
    for name in state:
        text = f"{OWN_CHECKPOINT} changes {name} {TWICE}, but this layout once"
        yield Problem(KEY, f"{text}: it would train other numbers; {PLAIN}")


def _seeds(at: CutModel, graph: Graph) -> Iterator[Problem]:
    """Yields a problem if one module seeds torch's random stream, and one on another stage draws from it."""
    for seeder in graph.effects.seeds:
        for drawer in graph.effects.draws:
            if covers(seeder, drawer) and seeder:
                continue
            stages = at.stage_of(seeder) if seeder else None, at.stage_of(drawer)
            if stages[0] is None or stages[0] != stages[1]:
                where = seeder or "the code between the named modules"
                text = f"{where} seeds torch's random stream, from which {drawer or 'that code'} draws"
                why = "but each stage has a stream of its own"
                yield Problem(KEY, f"{text}, {why}; pass a torch.Generator to the draw, and seed that")
                return


def _clocks(at: CutModel, graph: Graph, recomputes: bool) -> Iterator[Problem]:
    """Yields a problem if several ranks or recomputed forwards call functions such as clocks.

    These return another value at each call.
    """
    n = at.sizes.grid.size
    if graph.effects.clocks and (n > 1 or recomputes):
        who = f"each of {n} ranks gets" if n > 1 else "a recomputed forward gets"
        text = f"its output depends on {listed(graph.effects.clocks)}, and {who} a different value"
        cure = "" if n > 1 else "parallel.recompute=null"
        yield Problem(KEY, f"{text}; draw random numbers with torch, and count forwards in a buffer", cure)


def _references(skeleton: ModelStructure, graph: Graph) -> Iterator[Problem]:
    """Yields tensors that would miss updates of shared memory, get no gradient, or have no values."""
    learning = {p.name for p in skeleton.params if p.trainable}
    changed = {n for c in graph.effects.changes for n in c.names}
    kept = {p.name for p in skeleton.params}

    # memory that several names share
    for names in skeleton.traits.shared:
        of = [n for n in names if n in learning]
        for name in names:
            if of:
                if name not in kept and name in graph.effects.reads:
                    text = f"{name} shares memory with {of[0]}, and would no longer see its updates"
                    yield Problem(KEY, f"{text}; compute it from {of[0]} in the forward")
            elif name in changed:
                others = listed([n for n in names if n != name])
                text = f"the forward changes {name}, but {others}, with which it shares memory,"
                text += " would no longer see the change"
                yield Problem(KEY, f"{text}; keep one tensor, and take views of it in the forward")
                break

    # tensors that were created before the forward, or outside the model
    together = {n for names in skeleton.traits.shared for n in names}
    for name in skeleton.traits.computed:
        if name in graph.effects.reads and name not in together:
            text = f"{name} was computed from weights in the constructor"
            yield Problem(KEY, f"{text}, so no gradient flows through it; compute it in the forward")
    for shape in graph.effects.foreign:
        text = (
            f"the forward uses a tensor of shape {shape} that is neither a parameter nor "
            "a buffer of the model"
        )
        text += " and was not created in the forward: ranks have no values for it; register it as a buffer"
        yield Problem(KEY, text)


def _foreign_memory(skeleton: ModelStructure, graph: Graph) -> Iterator[Problem]:
    """Yields tensors that share memory with something outside of the model, if one of both changes."""
    carried = {kept.name for kept in graph.effects.carried}
    updated = {p.name for p in skeleton.params if p.trainable}
    updated |= {n for c in graph.effects.changes for n in c.names}
    own = "but the launcher gives that tensor memory of its own"
    for shared in skeleton.traits.foreign_memory:
        if shared.place in carried:
            text = f"the forward changes {shared.place}, in whose memory the constructor made {shared.name}"
            yield Problem(KEY, f"{text}, {own}; change the tensor instead")
        elif shared.read and shared.name in updated:
            text = f"the constructor made {shared.name} in the memory of {shared.place}, {own}"
            why = f"so code that reads {shared.place} would not see its updates"
            yield Problem(KEY, f"{text}, {why}; read {shared.name} instead, or make it from a copy")


def _early(at: CutModel, names: tuple[str, ...], alone: str) -> Iterator[Problem]:
    """Yields parameters whose gradient the backward reads, where it is not yet that of one process."""
    if at.sizes.replicas > 1:
        why, cure = (
            f"before it is summed over ranks; change gradients in your own optimizer, or {ALONE}",
            alone,
        )
    elif at.mixed:
        why, cure = "and in half precision this is the gradient of a copy", "train.precision=fp32"
    elif at.split:
        why, cure = f"and {at.scheduler} computes it later", "parallel.pipeline.scheduler=1f1b"
    else:
        return
    yield Problem(KEY, f"the backward reads the gradient of {listed(names)}, {why}", cure)


def _versions(at: CutModel, graph: Graph, placed: dict[str, Placed], alone: str) -> Iterator[Problem]:
    """Yields weights whose version the forward reads, if an update does not change the version."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, _ in graph.effects.versions:
        if placed[name].sharded:
            why = "each step gathers a sharded weight into the same tensor, whose version stays", alone
        elif at.mixed:
            why = "in half precision each step computes with a new copy of the weight", "train.precision=fp32"
        else:
            continue
        reasons.setdefault(why, []).append(name)
    for (text, cure), names in reasons.items():
        reads = f"the forward reads the version of {listed(names)} to notice updates, but {text}"
        yield Problem(KEY, f"{reads}; compute what depends on the weight in each forward", cure)


def _borrowed(at: CutModel, graph: Graph, placed: dict[str, Placed]) -> Iterator[Problem]:
    """Yields modules that use, by a reference in Python, tensors that their stage does not have."""
    lacking: dict[str, list[str]] = {}
    for module, name in graph.effects.borrowed:
        stage = at.stage_of(module)
        there = placed[name].stages if name in placed else (at.stage_of(owner(name)),)
        if stage is not None and stage not in there and not any(name in names for names in lacking.values()):
            lacking.setdefault(module, []).append(name)
    for module, names in lacking.items():
        text = f"{module} uses {listed(names)} of other modules by a reference in Python, but runs on stage"
        text += f" {at.stage_of(module)}, which does not have {'it' if len(names) == 1 else 'them'}"
        yield Problem(KEY, f"{text}; pass tensors to its forward, or put both modules on one stage")


def _late(at: CutModel, graph: Graph, placed: dict[str, Placed]) -> Iterator[Problem]:
    """Yields weights and state of other modules that a backward reads where its rank does not have them."""
    level = at.hsdp.optimizer_level if at.hsdp is not None else "level2"
    for module, name in graph.effects.late_reads:
        p, stage = placed.get(name), at.stage_of(module)
        there = p.stages if p is not None else (at.stage_of(owner(name)),)
        text = f"the backward of {module} reads {name} of another module by a reference in Python"
        way_out = "pass it to its forward, and save it for the backward"
        if stage is not None and stage not in there:
            text += f", but runs on stage {stage}, which does not have it"
            yield Problem(KEY, f"{text}; {way_out}, or put both modules on one stage")
        elif level != "level2" and p is not None and p.sharded:
            text += f", but {level} may have freed it by then"
            yield Problem(KEY, f"{text}; {way_out}", "parallel.hsdp.optimizer_level=level2")


def changed_tensors(graph: Graph, sizes: Sizes) -> frozenset[str]:
    """Returns the names of tensors that the forward changes, if there are replicas.

    Every replica keeps the full tensors and changes them alike.
    """
    return frozenset(n for c in graph.effects.changes for n in c.names if sizes.replicas > 1)


def notes(params: tuple[Placed, ...], sizes: Sizes, changed: frozenset[str]) -> list[Note]:
    """Returns a note on parameters that are not sharded because the forward changes them (``changed``)."""
    kept = [p.name for p in params if p.name in changed and not p.buffer]
    if not kept or sizes.grid["dp_shard"] == 1:
        return []
    verb, pronoun = ("stays", "it") if len(kept) == 1 else ("stay", "them")
    return [Note("parallel.hsdp", f"{listed(kept)} {verb} unsharded: the forward changes {pronoun}")]


def id_problems(job: Job, graph: Graph) -> Iterator[Problem]:
    """Yields tables that have no row for an id of the data: a rank would fail in the lookup."""
    data = job.data
    path = getattr(data, "target", None) or getattr(data, "path", None) or getattr(data, "name", "data")
    where = ", ".join(path) if isinstance(path, tuple | list) else str(path)
    for module, rows, most in graph.effects.ids_beyond_tables:
        text = f"{_where(module)} has a table of {rows} rows, but an id of the data ({where}) is {most}"
        cure = f"give it at least {most + 1} rows, or use data with smaller ids"
        yield Problem(
            KEY, f"{text}; {cure if most >= 0 else 'ids begin at 0: mask values that are not tokens'}"
        )


def _mixes(graph: Graph) -> bool:
    """Returns true if samples of a batch depend on one another.

    A model that remembers batches does not count: what it changes is checked instead.
    """
    return bool(graph.effects.mixing) and not _remembered(graph)


def _remembered(graph: Graph) -> list[str]:
    """Returns the names of the state that the forward changes depending on its samples, and then reads."""
    changes = [c.name for c in graph.effects.changes if c.by_data and c.read]
    return changes + [k.name for k in graph.effects.carried if k.by_data]


def _counted(graph: Graph) -> dict[str, list[str]]:
    """Returns the names of what each forward or backward changes and reads, as a counter does.

    The change does not depend on the samples.
    """
    out = {"forward": [c.name for c in graph.effects.changes if c.read and not c.by_data], "backward": []}
    for kept in graph.effects.carried:
        if not kept.by_data:
            out[kept.by].append(kept.name)
    return out


def _cuts_batch(sizes: Sizes) -> bool:
    return sizes.replicas * sizes.micros > 1


MIXED = "depends on the rest of its batch"


def _mixed(at: CutModel, graph: Graph) -> Problem:
    """Returns the problem of a model that mixes samples of a batch that the layout cuts.

    A loss class that compares samples is refused as well: sums over parts of the batch do not add up to it.
    """
    sizes = at.sizes
    parts = f"{many(sizes.micros, 'micro batch')} and {many(sizes.replicas, 'data-parallel rank')}"
    why = f"the batch is cut over {parts}, so each layout would train another model"
    alone = sizes.replicas == 1 and len(at.stages) == 1
    way_out = "compute each sample by itself, or train with one data-parallel rank, stage and micro batch"
    cure = "parallel.pipeline.micro_batch_num=1" if alone else ""
    return Problem(KEY, f"{graph.effects.mixing} {MIXED}, and {why}; {way_out}", cure)


def remarks(
    job: Job,
    skeleton: ModelStructure,
    graph: Graph,
    at: CutModel,
    recomputed: Sequence[Recomputed],
) -> list[Note]:
    """Returns notes on models that train, but to numbers that depend on other settings."""
    sizes = at.sizes
    out = _unsaved(job, skeleton, graph)
    if _mixes(graph):
        text = "another batch size, or a batch in parts, gives other results"
        out.append(Note(KEY, f"{graph.effects.mixing} {MIXED}: {text}"))
    if graph.effects.clocks:
        text = f"its output depends on {listed(graph.effects.clocks)}"
        out.append(Note(KEY, f"{text}: no other run gives the same numbers"))
    if (untested := graph.effects.untested_elements) is not None and _cuts_batch(sizes):
        large = f"a model of {untested / 1e6:.1f}M numbers is too large to test"
        fails = "its forward fails, or is not repeatable, for samples in other batches, which would show"
        text = "whether its samples depend on one another, as in a contrastive loss"
        other = "if they do, another number of data-parallel ranks or micro batches gives other results"
        out.append(Note(KEY, f"{large if untested else fails} {text}; {other}"))
    if (remembered := _remembered(graph)) and _cuts_batch(sizes):
        by = f"from the {many(sizes.micro_batch, 'sample')} of a micro batch and then reads it"
        other = "another number of micro batches gives other results"
        out.append(Note(KEY, f"the forward updates {listed(remembered)} {by}: {other}"))
    for what, counted in _counted(graph).items() if sizes.micros > 1 else ():
        if counted:
            by = f"once for each of {sizes.micros} micro batches of a step, and then reads it"
            other = "another number of micro batches gives other results"
            out.append(Note(KEY, f"the {what} changes {listed(counted)} {by}: {other}"))
    if sizes.micros > 1 and (updated := _only_updated(skeleton, graph)):
        by = f"once for each of {sizes.micros} micro batches of a step"
        other = "another number of micro batches gives other values"
        out.append(Note(KEY, f"the forward updates {listed(updated)} {by}: {other}"))
    norms = dict.fromkeys((*skeleton.traits.batch_norms, *map(_where, graph.effects.normalizing)))
    if norms and _cuts_batch(sizes):
        text = f"normalizes by the {many(sizes.micro_batch, 'sample')} of a rank's micro batch, not by all"
        names = listed([*norms])
        other = "another number of data-parallel ranks or micro batches gives other results"
        out.append(Note(KEY, f"BatchNorm ({names}) {text} {sizes.global_batch}: {other}"))
    once = _run_once(at, graph, recomputed)
    if kept := [c.name for c in graph.effects.changes if not c.read and once.intersection(c.at)]:
        text = f"{OWN_CHECKPOINT} updates {listed(kept)} {TWICE}, but this layout once"
        out.append(Note(KEY, f"{text}: these get other values; {PLAIN}"))
    if sizes.replicas > 1 and (first := _of_first_rank(skeleton, graph)):
        text = f"the forward updates {listed(first)} from the samples of a data-parallel rank"
        other = "another number of data-parallel ranks gives other values"
        out.append(Note(KEY, f"{text}, and each step takes over those of the first rank: {other}"))
    return out


def _of_first_rank(skeleton: ModelStructure, graph: Graph) -> list[str]:
    """Returns the buffers that only an evaluation reads, and that the first rank's samples decide.

    Those of BatchNorm have a note of their own; those of InstanceNorm are averaged over the ranks.
    """
    averaged = {*skeleton.traits.instance_norms}
    by_data = {
        c.name for c in graph.effects.changes if c.by_data and averaged.isdisjoint(map(owner, c.names))
    }
    return [name for name in _only_updated(skeleton, graph) if name in by_data]


def _only_updated(skeleton: ModelStructure, graph: Graph) -> list[str]:
    """Returns the buffers of checkpoints that training updates and does not read, without BatchNorm's."""
    saved = {p.name for p in skeleton.params if p.buffer}
    norms = {*skeleton.traits.batch_norms}
    changes = (c for c in graph.effects.changes if not c.read and not saved.isdisjoint(c.names))
    return [c.name for c in changes if norms.isdisjoint(map(owner, c.names))]


def _unsaved(job: Job, skeleton: ModelStructure, graph: Graph) -> list[Note]:
    """Returns notes on state that a resumed run starts anew, because no checkpoint contains it."""
    kinds = [step.kind for step in job.steps.values()]
    if job.checkpoint.every is None and "save" not in kinds:
        return []
    persistent = {p.name for p in skeleton.params}
    buffers = [c.name for c in graph.effects.changes if c.read and not persistent & {*c.names}]
    saved = skeleton.traits.extra_states
    python = [k for k in graph.effects.carried if k.name not in persistent]
    kept = [k for k in python if owner(k.name) not in saved]
    by_forward, by_backward = ([k.name for k in kept if k.by == by] for by in ("forward", "backward"))
    resets = graph.effects.resets
    lacking = [k.name for k in python if k not in kept and k.name in resets]
    in_python, register = "it is Python state", "make it a buffer, or return it from get_extra_state"
    not_restored, extra = (
        "set_extra_state does not restore it",
        "make it a buffer, or a part of the extra state",
    )
    left_out = "persistent=False keeps it out of the state dict"
    out = []
    for names, what, reason, cure in (
        (by_forward, "forward", in_python, register),
        (by_backward, "backward", in_python, register),
        (lacking, "forward", not_restored, extra),
        (buffers, "forward", left_out, "register it as a persistent buffer"),
    ):
        if names:
            text = f"{listed(names)}: the {what} changes and reads it, and {reason}; no checkpoint stores it"
            out.append(Note("checkpoint", f"{text}, so a resumed run resets it; {cure}"))

    # what a forward sets only once is no change from one forward to the next
    once = [n for n in graph.effects.resets if n and n not in {k.name for k in graph.effects.carried}]
    if once:
        text = f"{listed(once)}: a forward sets this Python state and later ones read it"
        why = "no checkpoint stores it, so a resumed run sets it anew"
        out.append(Note("checkpoint", f"{text}; {why}; make it a buffer"))
    elif graph.effects.resets == ("",) and not out:
        text = "a forward leaves state behind that later ones depend on, such as a hook that it removes"
        text += "; no checkpoint stores it, so a resumed run computes other results"
        out.append(Note("checkpoint", f"{text}; record in a buffer what the forward has done"))
    return out


DTYPES = (
    "weights and inputs have the dtype of train.precision, and tensors that a "
    "forward creates have torch's default, float32; create them with the dtype "
    "of a weight, as in x.to(weight.dtype)"
)


def _disagree(job: Job, at: CutModel, graph: Graph) -> Iterator[Problem]:
    """Yields a problem of calls with several dtypes, which names the weights of an unusual one."""
    calls = graph.effects.mixed_dtypes
    if not calls:
        return
    kept = DTYPE[job.train.precision]
    weights = [p for p in at.params if not p.buffer and p.spec.dtype.startswith(("float", "bfloat"))]
    odd = [f"{p.name} ({p.spec.dtype})" for p in weights if p.spec.dtype != kept]
    why = DTYPES
    if odd:
        cure = f"create such weights in torch's default dtype, {kept} here"
        why = f"the constructor names the dtype of {listed(odd)}; {cure}"
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    yield Problem(KEY, f"the forward calls {calls[0]}{more}, which torch rejects; {why}")


def _sparse(graph: Graph) -> Iterator[Problem]:
    tables = graph.effects.sparse_tables
    if tables:
        text = "looked up with sparse=True, but the launcher can neither sum nor clip sparse gradients"
        way_out = "remove sparse=True: dense gradients have the same numbers"
        yield Problem(KEY, f"{listed(tables)}: {text}; {way_out}")


def _changed(c: StateChange, p: Placed | None, at: CutModel, alone: str) -> Why | None:
    """Returns why the forward must not change this tensor, and the way out; ``None`` if it may."""
    weight = p is not None and not p.buffer
    if at.sizes.pieces > 1:
        cure = "parallel.pipeline.seq_chunks=1 parallel.pipeline.scheduler=1f1b"
        return ", which would happen once for every piece of a sequence", cure

    # each data-parallel rank would change it depending on its own samples
    if at.sizes.replicas > 1 and c.by_data and (weight or c.read):
        ranks = f"each of {at.sizes.replicas} data-parallel ranks"
        text = f" from rank-local data and then reads it: {ranks} would train another model"
        return f"{text}; {ALONE}", alone

    between = _between(c, p, at) if len(at.stages) > 1 else None
    if between is not None:
        return between

    # a rank has only a half-precision copy or a part of the weight
    if weight and at.mixed:
        return ", and in half precision the forward changes a copy", "train.precision=fp32"
    if weight and p is not None and _cut(p):
        return ", which is cut over tp; leave its module out of parallel.operators", ""
    return None


def _between(c: StateChange, p: Placed | None, at: CutModel) -> Why | None:
    """Returns why pipeline stages do not allow this change, and the way out; ``None`` if they do."""
    here = {at.stage_of(m) for m in c.at} - {None}  # glue is already on the stage of what it changes
    owners = set(p.stages) if p is not None else {at.stage_of(owner(n)) for n in c.names}
    if len(owners) > 1 and not c.cached:  # each copy fills a cache with the same numbers
        return (
            (f", and stages {_numbers(owners)} each have a copy; put all modules that use it on one stage"),
            "",
        )
    if here and not here <= owners:
        text = f", which is on stage {_numbers(owners)}, in {listed(c.at)} on stage {_numbers(here)}"
        return f"{text}; put both on one stage", ""
    if c.kept and not c.cached:
        text = " in place, and the backward of another micro batch still needs the old values"
        return f"{text}; compute with a copy, {c.name.rpartition('.')[2]}.clone()", ""
    return None


def _inner(i: Inner, at: CutModel) -> Why | None:
    """Returns why the forward cannot compute gradients itself, and the way out; ``None`` if it can."""
    if at.sharded:
        return "its sharded weights are not gathered at that point", "parallel.hsdp=null"
    if at.tp:
        return (
            "operators that are cut over tp communicate at that point; remove them from parallel.operators",
            "",
        )
    if at.mixed and i.backward:
        return "in half precision the gradients would be lost", "train.precision=fp32"

    # the path of the gradient must stay on one stage, and its backward must not be split
    if len(at.stages) == 1:
        return None
    if at.stage_of(i.module) is None:
        return (
            "that code is between the named modules, so the path of the gradient may lead to another stage; "
            "put all of it in one module",
            "",
        )
    if i.backward or any(covers(m, i.module) for s in at.stages for m in s.modules if m in i.crosses):
        return "the path of the gradient leads to another stage; put all of it in one module", ""
    if at.split:
        return f"{at.scheduler} splits the backward", "parallel.pipeline.scheduler=1f1b"
    return None


def _hooks(
    at: CutModel, skeleton: ModelStructure, placed: dict[str, Placed], alone: str
) -> Iterator[Problem]:
    """Yields problems for hooks of parameters and for backward hooks of modules."""
    for name in skeleton.traits.hooked:
        why = _hooked(placed[name], at, alone)
        if why:
            yield Problem(KEY, f"the parameter {name} has hooks, and {why[0]}", why[1])
    for module in skeleton.traits.backward:
        if len(at.stages) > 1 and at.stage_of(module) is None:
            text = f"{_where(module)} has backward hooks and runs on several stages"
            yield Problem(KEY, f"{text}; put them on a module that runs on one stage")
        elif at.tp:
            text = f"{_where(module)} has backward hooks, which would see only a part of the gradient beside"
            yield Problem(KEY, f"{text} operators that are cut over tp; remove those from parallel.operators")


def _hooked(p: Placed, at: CutModel, alone: str) -> Why | None:
    """Returns why hooks of this parameter would not see the same as in one process, and the way out."""
    if at.sizes.replicas > 1:
        ranks = f"each of {at.sizes.replicas} data-parallel ranks"
        way_out = f"change gradients in your own optimizer, or {ALONE}"
        return f"{ranks} would call them with the gradient of its own samples only; {way_out}", alone

    # in one process the hooks see the full gradient
    if len(p.stages) > 1:
        return (
            (
                f"stages {_numbers(p.stages)} use it, and each would call the hooks with its "
                "part of the gradient"
            ),
            "",
        )
    if _cut(p):
        way_out = "leave it out of parallel.operators"
        return f"it is cut over tp, so the hooks would see only a part of the gradient; {way_out}", ""

    # and they see the gradient of the parameter itself, once
    if at.mixed:
        return "in half precision its gradient is that of a copy", "train.precision=fp32"
    if at.split:
        return f"{at.scheduler} splits the backward, which bypasses hooks", "parallel.pipeline.scheduler=1f1b"
    return None


def _inputs(at: CutModel, graph: Graph) -> Iterator[Problem]:
    """Yields modules that would compute other results because stages send only the values of a tensor."""
    packed = {c.name: c.packed for row in at.boundaries for c in row}
    differentiating = {inner.module for inner in graph.effects.inner_gradients}
    asking = graph.strided if at.lengths else graph.gapped  # pieces of a sequence are sent contiguous
    computing = graph.effects.differ_if_contiguous if at.lengths else ()
    way_out = "call .contiguous() before, or put both on one stage"
    for stage in at.stages[1:]:
        received = [n for n in packed if n not in stage.nodes]
        for node in (graph[n] for n in stage.nodes):
            if node.kind != "module":
                continue
            module = node.target
            taken = [n for n in received if n in node.inputs or graph[n].lies & node.reads]
            direct = min(
                (n for n in taken if n in node.inputs), key=lambda n: any(graph[n].dims), default=None
            )
            if module in asking and direct is not None:
                text = f"{module} reads the memory layout of its input (is_contiguous, stride)"
                why = f"stages send {direct} as a contiguous tensor, which it is not in one process"
                yield Problem(KEY, f"{text}, but {why}; {way_out}")
            elif taken and module in computing:
                text = f"{module} reads the memory layout of a tensor that it computes from {listed(taken)}"
                yield Problem(
                    KEY, f"{text}, but stages send pieces of a sequence as contiguous tensors; {way_out}"
                )
            elif taken and module in graph.memory_writers and module not in graph.overwrites:
                text = f"{module} changes {listed(taken)} by .data, which autograd does not see"
                why = "it gets a copy: what earlier stages saved for the backward would not change"
                cure = "create a new tensor, or put both on one stage"
                yield Problem(KEY, f"{text}, but as a stage sends it, {why}; {cure}")
            elif module in differentiating:
                continue  # what it lacks is the path of the gradient, which another check refuses
            elif taken and (
                module in graph.effects.differ_if_copied
                or (module in graph.effects.differ_if_separate and any(packed[n] for n in taken))
            ):
                text = (
                    f"{module} computes other results for a plain copy of {listed(taken)}: it depends on more"
                )
                why = f"than the values ({ASKS}), but stages send only the values"
                cure = "pass what it needs as an argument, or put both on one stage"
                yield Problem(KEY, f"{text} {why}; {cure}")


def _left_values(at: CutModel, graph: Graph) -> Iterator[Problem]:
    """Yields modules that read a value that another module has left behind, which stages do not send."""
    nodes = [graph[n] for stage in at.stages for n in stage.nodes] if len(at.stages) > 1 else []
    for module in dict.fromkeys(n.target for n in nodes if n.kind == "module"):
        if module in graph.effects.need_other_modules:
            text = (
                f"{module} computes something else if no other module has run: it reads a value that one of"
            )
            why = (
                "them leaves behind (in a global variable, a class or an attribute), which stages do not send"
            )
            cure = "pass the value as an argument, or put both in one module"
            yield Problem(KEY, f"{text} {why}; {cure}")


def _fused(job: Job, at: CutModel, skeleton: ModelStructure) -> Iterator[Problem]:
    """Yields a problem if ``eval()`` computes tensors from weights that are sharded at that point."""
    who = evaluated_by(job)
    if skeleton.traits.fused and who and at.sharded:
        text = f"eval() computes {listed(skeleton.traits.fused)} from weights, but at {' and '.join(who)}"
        why = "each rank has only its shards of them"
        yield Problem(KEY, f"{text} {why}; compute it in the forward, or shard nothing", "parallel.hsdp=null")


ASKS = "a tensor's class, attributes, is_leaf, grad_fn, whether it is a view or the same object as another"
"""Properties of inputs, besides their values, on which the output of a module may depend."""


def _overwrites(at: CutModel, graph: Graph) -> Iterator[Problem]:
    """Yields modules with sharded weights that do what FSDP2 does not support.

    For example, FSDP2 passes views of the inputs to a module that it gathers, and autograd does not allow
    in-place changes of them.
    """
    gathered = {m for g in at.groups for m in g.modules if m}
    duals = [m for m, what in graph.effects.inside_modes if what == DUAL]
    for modules, why, way_out in (
        (duals, ": called on dual numbers (torch.autograd.forward_ad), which the gathering of weights "
                "does not differentiate", "use torch.func.jvp within a module"),
        (graph.inferred, " runs in torch.inference_mode, where sharded weights cannot be gathered",
         "use torch.no_grad instead"),
        (graph.overwrites, ": its forward changes its input in place, which FSDP2 does not allow for "
                           "modules with sharded weights",
         "create a new tensor (inplace=False, x = x + y)"),
        (graph.aliased, ": its result shares memory with its input, or with another of its results, and one "
                        "of them is changed in place later, but FSDP2 passes new tensors to modules with "
                        "sharded weights, and their results are copied",
         "return a copy (x.clone()), or create a new tensor in place of the change"),
        (graph.named, ": an attribute is set on its input, by its own forward or later on a result that "
                      "is this input, but FSDP2 passes new tensors to modules with sharded weights",
         "return the value that the attribute has"),
        (graph.sparse, ": called with a sparse tensor that needs a gradient, which FSDP2 cannot pass to "
                       "modules with sharded weights",
         "pass its indices and values, or a dense tensor"),
        (graph.lazy, ": its forward returns a generator, whose code would run after its weights "
                     "have been resharded", "return a list"),
        (graph.fills, ": its forward changes a list or dictionary argument, but FSDP2 passes a "
                      "copy to modules with sharded weights", "return what it adds"),
        (graph.effects.differ_if_gathered,
         f": depends on more than the values of its inputs ({ASKS}), but FSDP2 passes new tensors to modules "
         "with sharded weights", "pass what it needs as an argument"),
    ):  # fmt: skip
        affected = [m for m in modules if m in gathered]
        if affected:
            text = f"{listed(affected)}{why}; {way_out}, or shard nothing"
            yield Problem(KEY, text, "parallel.hsdp=null")

    # FSDP2 reshards the weights of a module whose state dict is requested, even while its forward runs
    if at.sharded and graph.effects.state_dicts:
        who = listed([m or "the model" for m in graph.effects.state_dicts])
        text = (
            f"{who}: its forward calls state_dict() or load_state_dict(), and then FSDP2 reshards the weights"
        )
        yield Problem(KEY, f"{text}; use named_parameters(), or shard nothing", "parallel.hsdp=null")

    if graph.requires_grad_changes:
        yield from _toggles(at, *graph.requires_grad_changes[0])

    if at.hsdp is not None and at.hsdp.optimizer_level == "level3":
        yield from _gathered_again(graph, gathered)


def _gathered_again(graph: Graph, gathered: set[str]) -> Iterator[Problem]:
    """Yields modules whose weights level3 would gather again too late, not at all, or where it must not.

    It gathers the weights of a module after tensor hooks have run, and only the module's own.
    """
    # see _inner
    cure = "parallel.hsdp=null" if graph.effects.inner_gradients else "parallel.hsdp.optimizer_level=level2"
    affected = [m for m in graph.effects.hooks if any(covers(g, m) or covers(m, g) for g in gathered)]
    if affected:
        who = listed([m or "the model" for m in affected])
        text = f"{who}: a tensor hook or backward pre-hook uses weights"
        yield Problem(KEY, f"{text} before level3 has gathered them again", cure)

    opaque = {m: what for m, what in graph.opaque if m in gathered}
    if opaque:
        who, what = listed(list(opaque)), next(iter(opaque.values()))
        does, parts = f"returns an object ({what})", "tensors or modules"
        if not what:
            parts = "tensors"
            does = (
                "returns no tensor that needs a gradient, but leaves one elsewhere, such as in an attribute"
            )
        text = f"{who}: its forward {does}. FSDP2 does not find the {parts} in it, so level3 would not"
        text += " gather the weights again for them"
        way_out = "return a tuple, list or dictionary of tensors, or keep the weights gathered"
        yield Problem(KEY, f"{text}; {way_out}", cure)

    affected = [m for m in graph.other_parameters if any(covers(g, m) for g in gathered)]
    if affected:
        text = f"{listed(affected)}: called with another tensor in place of a weight, but level3 would"
        yield Problem(KEY, f"{text} gather the weight", cure)


def _toggles(at: CutModel, name: str, module: str) -> Iterator[Problem]:
    """Yields a parameter whose ``requires_grad`` a forward sets, where ranks would lose that."""
    if len(at.stages) > 1:
        why, cure = "in a pipeline forwards come before the backward of earlier micro batches", ""
    elif at.sharded:
        why, cure = "FSDP2 passes it a gathered copy", "parallel.hsdp=null"
    elif at.mixed:
        why, cure = "in half precision the forward changes a copy", "train.precision=fp32"
    else:
        return
    text = f"the forward of {module or 'the model'} sets requires_grad of {name}, but {why}"
    yield Problem(KEY, f"{text}; freeze it in the constructor, or detach() its output", cure)


def _twins(at: CutModel, skeleton: ModelStructure, placed: dict[str, Placed]) -> Iterator[Problem]:
    """Yields modules with sharded weights that several stages of one rank run: FSDP2 wraps a module once."""
    for names in skeleton.traits.several_names:
        stages = (at.stage_of(n) for n in names)
        here = {stage for stage in stages if stage is not None}
        ranks = [at.sizes.places[s] for s in here]
        mine = [p for n in names for m, p in placed.items() if covers(n, owner(m))]
        if len(set(ranks)) < len(ranks) and any(p.sharded for p in mine):
            text = f"{' and '.join(names)} are one module, on stages {_numbers(here)}"
            text += ", two of which are on one rank, and its weights are sharded"
            yield Problem(KEY, text, "parallel.hsdp=null")


def _cut(p: Placed) -> bool:
    return any("tp" in axes for axes in p.layout.split)


def _where(module: str) -> str:
    return module or "the model's own forward"


def _numbers(stages: object) -> str:
    return " and ".join(map(str, sorted(s for s in stages if s is not None)))  # type: ignore[attr-defined]


LORA = "model.lora"


def problems(job: Job, params: Sequence[Placed], graph: Graph) -> Iterator[Problem]:
    """Yields a problem for linear modules with adapters that the forward never calls.

    Other code may use their weights, but it does not use the adapters.
    """
    never = {name for name, scope in graph.scopes if scope is None}
    idle = [p.name.rpartition(".")[0] for p in params if p.role == "adapter" and never.intersection(p.names)]
    if job.model.lora is not None and idle:
        names = some([*dict.fromkeys(idle)])
        text = (
            f"{names}: the forward never calls it, so an adapter would have no effect; "
            "remove it from the list"
        )
        yield Problem(f"{LORA}.modules", text)


def lora_notes(job: Job, params: Sequence[Placed]) -> Iterator[Note]:
    """Yields a note on how much ``model.lora`` trains."""
    if job.model.lora is None:
        return
    adapters = [p for p in params if p.role == "adapter"]
    numbers = sum(prod(p.spec.shape) for p in adapters)
    total = sum(prod(p.spec.shape) for p in params if not p.buffer)
    summary = f"{many(len(adapters) // 2, 'adapter')} of rank {job.model.lora.rank}"
    text = f"{summary}: {numbers} of {total} numbers are trained, all others are frozen"
    if kept_half := [p for p in params if p.half]:
        size = sum(prod(p.spec.shape) for p in kept_half)
        text += f"; {size} of them are kept in {kept_half[0].spec.dtype}, their original dtype"
    yield Note(LORA, text)


def recording_problems(skeleton: ModelStructure) -> Iterator[Problem]:
    """Yields a problem for hooks of parameters, which a recorded forward does not contain."""
    for name in skeleton.traits.hooked:
        text = f"the parameter {name} has hooks, but ranks of a device matrix have only parts of its gradient"
        yield Problem(KEY, f"{text}; change gradients in your own optimizer")
