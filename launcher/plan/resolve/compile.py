"""``train.compile``: modules whose forward and backward torch compiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from launcher.errors import Problem
from launcher.job.schema.did_you_mean import nearest
from launcher.job.schema.job import Job
from launcher.job.schema.train import Compile
from launcher.job.schema.user_class import Target
from launcher.plan.communication.buckets_and_gathers import GatherGroup
from launcher.plan.cut.stages import covers
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.cut.uncut_modules import units
from launcher.plan.cut_model import CutModel
from launcher.plan.schedule.schedules import Rule
from launcher.plan.sizes import Sizes
from launcher.plan.values.compilation import INDUCTOR, STAGE, Compilation
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.module_names import listed, uncallable
from launcher.plan.values.note import Note
from launcher.plan.values.text import some

KEY = "train.compile"
MODULES, BACKEND, MODE, FULLGRAPH = f"{KEY}.modules", f"{KEY}.backend", f"{KEY}.mode", f"{KEY}.fullgraph"
AUTO, STAGES = "auto", "stages"
OFF, TO_AUTO, IN_PARTS = f"{KEY}=null", f"{MODULES}={AUTO}", f"{FULLGRAPH}=false"
FUSED = "parallel.comm_fusion.openstate=true"
COMM = "parallel.recompute.comm"
RECORDED = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs."""


def problems(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields problems that do not depend on the model."""
    settings = job.train.compile
    if settings is None:
        return
    if settings.mode != "default" and settings.backend != INDUCTOR:
        text = f"{settings.mode}: is a mode of {INDUCTOR}, but {BACKEND} is {settings.backend}"
        yield Problem(MODE, text, f"{MODE}=default")
    elif settings.mode in RECORDED:
        text = f"{settings.mode}: records CUDA graphs, which support one call at a time"
        text += ", but a step has several micro batches in flight"
        yield Problem(MODE, text, f"{MODE}=max-autotune-no-cudagraphs")
    if sizes is not None and sizes.pieces > 1:
        text = f"parallel.pipeline.seq_chunks is {sizes.pieces}: modules keep state"
        text += " from one piece of a sequence to the next, which a compiled graph does not see"
        yield Problem(KEY, f"{text}; use only one of the two", OFF)


def split(job: Job, rule: Rule) -> Iterator[Problem]:
    """Yields a problem if the scheduler splits backwards, because a compiled backward cannot be split."""
    if job.train.compile is not None and rule.split:
        scheduler = job.parallel.pipeline.scheduler
        text = (
            f"{scheduler} splits each backward in two, but a compiled backward cannot be "
            "split; 1f1b does not split backwards"
        )
        more = "" if rule.single else " parallel.pipeline.interleave=true parallel.pipeline.chunks=2"
        yield Problem(KEY, text, f"parallel.pipeline.scheduler=1f1b{more}")


def unknown_backend(job: Job, known: Iterable[str]) -> Iterator[Problem]:
    """Yields a problem if the backend is not among ``known``, those of this torch."""
    settings = job.train.compile
    if settings is None or settings.backend in known:
        return
    usual = sorted(b for b in known if "TESTING" not in b)
    best = nearest(settings.backend, usual) or INDUCTOR
    text = f"{settings.backend}: torch has no such backend; it has {', '.join(usual)}"
    yield Problem(BACKEND, text, f"{BACKEND}={best}")


def in_place_problems(job: Job, seen: bool) -> list[Problem]:
    """Refuses to compile a model that changes a tensor in place between two operators over tp that use it.

    ``seen``: the trace has seen such a change.
    """
    if job.train.compile is None or not seen:
        return []
    text = (
        "the model changes in place a tensor that two operators over tp take as input, and a "
        "compiled graph cannot tell the old value from the new one"
    )
    return [Problem(KEY, f"{text}; create a new tensor instead", OFF)]


def broken(reasons: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for each reason in ``reasons``, which maps modules to why they are not one graph."""
    alike = {why: [m or "the model" for m in reasons if reasons[m] == why] for why in reasons.values()}
    return [
        Problem(FULLGRAPH, f"true: {some(modules)}: torch cannot make one graph of it: {why}", IN_PARTS)
        for why, modules in alike.items()
    ]


def resolve(job: Job, model: TracedModel, at: CutModel) -> tuple[Compilation | None, list[Problem]]:
    """Returns what torch compiles, and the problems with it; ``None`` if nothing is to be compiled.

    The modules are in definition order, without those inside of another one that is compiled.
    """
    settings = job.train.compile
    if settings is None:
        return None, []
    modules, problems = _named(settings, model.skeleton, model.graph, at)
    if problems:
        return None, problems
    problems = [
        *_cut_open(modules, at),
        *_gathered_inside(modules, job, at.groups),
        *_no_graph(modules, model),
        *_several_graphs(settings, modules, model),
        *_selected_inside(modules, model),
        *_over_tp(modules, model),
    ]
    made = Compilation(
        modules=modules,
        backend=settings.backend,
        mode=settings.mode,
        fullgraph=settings.fullgraph,
        dynamic=settings.dynamic,
        timeout_s=settings.timeout_s,
        loss=not isinstance(job.loss, Target) and model.operators.output is None,
    )
    return made, problems


def notes(made: Compilation | None) -> Iterator[Note]:
    """Yields a note on how compilation is counted in the bytes and times of the plan."""
    if made is None:
        return
    text = "the plan assumes that inductor fuses kernels: between matrix products and attention each tensor "
    text += "is read and written once, and recomputable tensors are not saved; validation runs eagerly"
    if not made.fuses:
        text = f"bytes and times of this plan are those of eager code, because {made.backend} may fuse no "
        text += "kernels; validation runs eagerly"
    yield Note(KEY, text)


def _named(
    settings: Compile, skeleton: ModelStructure, graph: Graph, at: CutModel
) -> tuple[tuple[str, ...], list[Problem]]:
    if settings.modules == STAGES:
        return (STAGE,), []
    if settings.modules == AUTO:
        return _blocks(skeleton, graph, at), []
    keys = (settings.modules,) if isinstance(settings.modules, str) else settings.modules
    problems = [
        *uncallable(MODULES, settings.modules, skeleton),
        *(p for key in keys for p in _idle(key, skeleton, graph)),
    ]
    chosen: list[str] = []
    for module in _called(skeleton, graph):
        inside = any(covers(around, module) for around in chosen)
        if not inside and any(fnmatchcase(module, key) for key in keys):
            chosen.append(module)
    return tuple(chosen), problems


def _blocks(skeleton: ModelStructure, graph: Graph, at: CutModel) -> tuple[str, ...]:
    """Returns the units that contain modules.

    If there are none, these are all units with parameters; without such, the stages. Units that torch cannot
    put in one graph are left out, unless that leaves none.
    """
    called = set(_called(skeleton, graph)).intersection(units(skeleton))
    uncut = [u for u in skeleton.modules if u in called and at.stage_of(u) is not None]
    apart = [u for u in uncut if not _inner(u, at.groups)]
    made = [u for u in apart if any(m != u and covers(u, m) for m in skeleton.modules)]
    loaded = [u for u in apart if any(covers(u, p.name) for p in skeleton.params)]
    quiet = [u for u in made or loaded if not any(covers(u, m) for m in graph.value_readers)]
    return tuple(quiet or made or loaded or [STAGE])


def _called(skeleton: ModelStructure, graph: Graph) -> Iterator[str]:
    """Returns the modules that a forward calls, in definition order."""
    calls = dict(graph.calls)
    return (m for m in skeleton.modules if calls.get(m, 1) and m not in skeleton.lists)


def _idle(key: str, skeleton: ModelStructure, graph: Graph) -> Iterator[Problem]:
    """Yields a problem if ``key`` matches only modules that no forward calls."""
    named = [m for m in skeleton.modules if fnmatchcase(m, key) and m not in skeleton.lists]
    if named and not any(m in named for m in _called(skeleton, graph)):
        text = f"{key}: the model calls none of these modules; name other ones, or {AUTO}"
        yield Problem(MODULES, text, TO_AUTO)


def _cut_open(modules: Iterable[str], at: CutModel) -> Iterator[Problem]:
    """Yields problems for modules that are never called, because stages run their parts one by one."""
    for m in modules:
        if m != STAGE and at.stage_of(m) is None:
            text = f"{m}: stages run its submodules one by one, so it is never called itself"
            yield Problem(MODULES, f"{text}; name modules inside it, or {AUTO}", TO_AUTO)


def _inner(module: str, groups: Iterable[GatherGroup]) -> list[str]:
    """Returns the modules whose weights are gathered while ``module`` runs."""
    return [m for g in groups for m in g.modules if m not in (module, STAGE) and covers(module, m)]


def _gathered_inside(modules: Iterable[str], job: Job, groups: Sequence[GatherGroup]) -> Iterator[Problem]:
    """Yields a problem if weights are gathered inside of a compiled module.

    FSDP2 gathers weights in a hook before a module is called, which a graph cannot contain.
    """
    gathered = {m: inner for m in modules if (inner := _inner(m, groups))}
    for m, inner in list(gathered.items())[:1]:
        name = m or f"{STAGES}: a stage"
        text = f"{name} is one graph, but the weights of {some(inner)} are gathered inside it"
        if job.parallel.comm_fusion.openstate:
            yield Problem(MODULES, f"{text}; {AUTO} compiles only modules that are gathered at once", TO_AUTO)
        else:
            yield Problem(MODULES, f"{text}; with fusion, a block is gathered at once", FUSED)


def _no_graph(modules: Sequence[str], model: TracedModel) -> Iterator[Problem]:
    """Yields problems for modules that torch cannot compile at all, not even in several graphs."""
    inner = [i.module for i in model.graph.effects.inner_gradients]
    taken = [m or "each stage" for m in modules if any(covers(m, i) or covers(i, m) for i in inner)]
    if taken:
        text = (
            f"{some(taken)}: the forward computes a gradient itself, but a compiled graph "
            "does not support double backward"
        )
        yield Problem(MODULES, f"{text}; name other modules", OFF)
    own = model.skeleton.traits.compiled
    twice = [m or "each stage" for m in modules if any(covers(m, c) or covers(c, m) for c in own)]
    if twice:
        text = f"{some(twice)}: the model has already compiled {own[0] or 'itself'} (torch.compile)"
        yield Problem(MODULES, f"{text}; name other modules", OFF)


def _several_graphs(settings: Compile, modules: Sequence[str], model: TracedModel) -> Iterator[Problem]:
    """Yields problems for modules that torch can compile in several graphs, but not in a single one."""
    if not settings.fullgraph:
        return
    looks = _with(modules, model.graph.value_readers)
    if looks:
        text = f"true: {looks}: the control flow depends on the data, so there is no single graph"
        yield Problem(FULLGRAPH, text, IN_PARTS)
    hooked = model.skeleton.traits.backward
    hooks = _with(modules, [h for h in hooked if h not in modules])  # its own hooks run outside of its graph
    if hooks:
        text = f"true: {hooks}: a module inside has a backward hook, which torch cannot put in a graph"
        yield Problem(FULLGRAPH, text, IN_PARTS)


def _with(modules: Iterable[str], inside: Iterable[str]) -> str:
    """Lists the ``modules`` that contain one of ``inside``."""
    inner = list(inside)
    return some([m or "each stage" for m in modules if any(covers(m, w) for w in inner)])


def _selected_inside(modules: Iterable[str], model: TracedModel) -> Iterator[Problem]:
    """Yields a problem if a compiled module is inside of one that is selectively recomputed.

    Selective recomputation keeps results of single operations, which a graph hides.
    """
    for r in model.recomputed:
        inner = [m for m in modules if m not in (STAGE, r.module) and covers(r.module, m)]
        if inner and r.policy == "selective":
            text = f"{some(inner)}: inside {r.module}, where parallel.recompute keeps results of single"
            yield Problem(MODULES, f"{text} operations, which a graph hides; compile {r.module}", TO_AUTO)
            return


def _over_tp(modules: Sequence[str], model: TracedModel) -> Iterator[Problem]:
    """Yields problems for compiled modules with operators over tp.

    An operator shares its gathered input with neighboring operators, so it cannot be a graph of its own.
    Recomputation and compilation of operators over tp combine only in some ways.
    """
    cut = [s.operator.module for s in model.operators.spreads]
    single = [m for m in modules if m in cut]
    if single:
        text = f"{some(single)}: an operator over tp shares its input with neighboring operators"
        yield Problem(MODULES, f"{text}; compile the module around it", TO_AUTO)

    again = [r for r in model.recomputed if any(covers(r.module, operator) for operator in cut)]
    around = [r.module for r in again if any(m != r.module and covers(r.module, m) for m in modules)]
    if around:
        text = f"{around[0]} is recomputed and cut over tp, and a module inside it is compiled: the graph"
        text += f" would repeat collectives needlessly; compile {around[0]} or recompute it, not both"
        yield Problem(MODULES, text, OFF)

    inside = [r for r in again if any(covers(m, r.module) for m in modules)]
    fully_recomputed = [r.module for r in inside if r.policy == "full"]
    if fully_recomputed:
        text = f"{some(fully_recomputed)}: a graph cannot recompute all of a module that is cut over tp"
        cure = "parallel.recompute.policy=selective parallel.recompute.comm=keep"
        yield Problem(MODULES, f"{text}; use policy selective", cure)
    elif any(r.comm and r.module not in modules for r in inside):
        text = "recompute: a partial graph would also send its last result over tp again"
        yield Problem(COMM, f"{text}, for nothing", f"{COMM}=keep")


def line(made: Compilation) -> str:
    """Describes ``made`` in one line of the plan."""
    names = "each stage" if made.modules == (STAGE,) else listed(made.modules)
    mode = "" if made.mode == "default" else f" ({made.mode})"
    graphs = "one graph each" if made.fullgraph else "eager where it cannot be compiled"
    shapes = {True: "any shape", False: "the planned shapes", None: "shapes that torch chooses"}[made.dynamic]
    patience = f"the first step may take {made.timeout_s:g} s"
    names += " and the loss" if made.loss else ""
    return f"{names} by {made.backend}{mode}: {graphs}, for {shapes}; {patience}"
