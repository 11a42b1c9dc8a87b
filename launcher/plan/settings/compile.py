"""``train.compile``: modules whose forward and backward torch compiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Compile, Job
from launcher.job.schema.similar_names import nearest
from launcher.plan.cost.cut_model import CutModel
from launcher.plan.cost.fusion import Group
from launcher.plan.partition.sizes import Note, Sizes
from launcher.plan.partition.stage_config import units
from launcher.plan.partition.stages import covers
from launcher.plan.schedule.schedules import Rule
from launcher.plan.traced_model import TracedModel
from launcher.plan.values.compilation import STAGE, Compilation
from launcher.plan.values.facts import Graph, Skeleton
from launcher.plan.values.text import listed, some

KEY = "train.compile"
MODULES, BACKEND, MODE, FULLGRAPH = f"{KEY}.modules", f"{KEY}.backend", f"{KEY}.mode", f"{KEY}.fullgraph"
OFF = f"{KEY}=null"
FUSED = "parallel.comm_fusion.openstate"
AUTO, STAGES, INDUCTOR = "auto", "stages", "inductor"
RECORDED = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs."""


def refused(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """What cannot be compiled whatever the model is."""
    asked = job.train.compile
    if asked is None:
        return
    if asked.mode != "default" and asked.backend != INDUCTOR:
        text = f"{asked.mode}: is a mode of {INDUCTOR}, and {BACKEND} is {asked.backend}"
        yield Problem(MODE, text, f"{MODE}=default")
    elif asked.mode in RECORDED:
        text = f"{asked.mode}: records CUDA graphs, which hold one call at a time, and a step has several micro batches"
        yield Problem(MODE, f"{text} under way", f"{MODE}=max-autotune-no-cudagraphs")
    if sizes is not None and sizes.pieces > 1:
        text = (
            f"parallel.pipeline.seq_chunks is {sizes.pieces}: modules keep state from one piece of a sequence"
        )
        yield Problem(KEY, f"{text} to the next, which a graph does not see; leave one of the two out", OFF)


def split(job: Job, rule: Rule) -> Iterator[Problem]:
    """Schedulers that cut a backward in two: a compiled one is one piece."""
    if job.train.compile is not None and rule.split:
        scheduler = job.parallel.pipeline.scheduler
        text = f"{scheduler} cuts each backward in two, and a compiled one is one piece; 1f1b leaves it whole"
        more = "" if rule.single else " parallel.pipeline.interleave=true parallel.pipeline.chunks=2"
        yield Problem(KEY, text, f"parallel.pipeline.scheduler=1f1b{more}")


def unknown_backend(job: Job, known: Iterable[str]) -> Iterator[Problem]:
    """``known``: those that this torch has."""
    asked = job.train.compile
    if asked is None or asked.backend in known:
        return
    usual = sorted(b for b in known if "TESTING" not in b)
    best = nearest(asked.backend, usual) or INDUCTOR
    text = f"{asked.backend}: torch has no such backend; it has {', '.join(usual)}"
    yield Problem(BACKEND, text, f"{BACKEND}={best}")


def overwritten(job: Job, seen: bool) -> list[Problem]:
    """``seen``: a tensor was changed in place between two operators over tp that take it."""
    if job.train.compile is None or not seen:
        return []
    text = "the model changes in place what two operators over tp take, which a graph cannot tell apart"
    return [Problem(KEY, f"{text}; let it make a new tensor", OFF)]


def resolve(job: Job, model: TracedModel, at: CutModel) -> tuple[Compilation | None, list[Problem]]:
    """The modules that are asked for, in definition order; nothing inside of one that is compiled as a whole."""
    asked = job.train.compile
    if asked is None:
        return None, []
    modules, found = _named(asked, model.skeleton, model.graph, at)
    if found:
        return None, found
    found = [
        *_cut_open(modules, model, at),
        *_gathered_inside(modules, job, at.groups),
        *_no_graph(asked, modules, model),
        *_rerun(modules, model),
        *_over_tp(modules, model),
    ]
    made = Compilation(modules, asked.backend, asked.mode, asked.fullgraph, asked.dynamic, asked.timeout_s)
    return made, found


def notes(job: Job) -> Iterator[Note]:
    """What else is to be known of it."""
    if job.train.compile is not None:
        yield Note(KEY, "bytes and times of this plan are those of eager code; validation runs eagerly")


def _named(
    asked: Compile, skeleton: Skeleton, graph: Graph, at: CutModel
) -> tuple[tuple[str, ...], list[Problem]]:
    if asked.modules == STAGES:
        return (STAGE,), []
    if asked.modules == AUTO:
        return _blocks(skeleton, graph, at), []
    keys = (asked.modules,) if isinstance(asked.modules, str) else asked.modules
    found = [p for key in keys for p in _nobody(key, skeleton, graph)]
    chosen: list[str] = []
    for module in _called(skeleton.modules, graph):
        inside = any(covers(around, module) for around in chosen)
        if not inside and any(fnmatchcase(module, key) for key in keys):
            chosen.append(module)
    return tuple(chosen), found


def _blocks(skeleton: Skeleton, graph: Graph, at: CutModel) -> tuple[str, ...]:
    """The units that are made of modules; of a model that has none, all that have parameters, or else the stages."""
    whole = [
        u for u in _called(units(skeleton), graph) if at.stage_of(u) is not None and not _inner(u, at.groups)
    ]
    made = [u for u in whole if any(m != u and covers(u, m) for m in skeleton.modules)]
    loaded = [u for u in whole if any(covers(u, p.name) for p in skeleton.params)]
    quiet = [u for u in made or loaded if not any(covers(u, m) for m in graph.looks)]
    return tuple(quiet or made or loaded or [STAGE])


def _called(modules: Sequence[str], graph: Graph) -> Iterator[str]:
    """Those that a forward calls: a list of modules is not."""
    calls = dict(graph.calls)
    return (m for m in modules if calls.get(m, 1))


def _nobody(key: str, skeleton: Skeleton, graph: Graph) -> Iterator[Problem]:
    """A key that stands for no module, or for one that nobody calls."""
    named = [m for m in skeleton.modules if fnmatchcase(m, key)]
    if not named:
        tops = list(dict.fromkeys(m.split(".")[0] for m in skeleton.modules))[:12]
        yield Problem(MODULES, f"{key}: no module is called so; there are {', '.join(tops)}")
    elif not any(_called(named, graph)):
        text = f"{key}: a forward calls none of these; of a list of modules name what is in it"
        inside = any(m.startswith(f"{key}.") for m in skeleton.modules)
        yield Problem(MODULES, text, quote(f"{MODULES}={key}.*") if inside else f"{MODULES}={AUTO}")


def _cut_open(modules: Iterable[str], model: TracedModel, at: CutModel) -> Iterator[Problem]:
    """Modules of which the stages run the parts one by one."""
    for m in modules:
        if m != STAGE and at.stage_of(m) is None:
            text = f"{m}: stages run what is in it one by one, so it is never called as a whole"
            yield Problem(MODULES, f"{text}; name modules inside of it, or {AUTO}", f"{MODULES}={AUTO}")


def _inner(module: str, groups: Iterable[Group]) -> list[str]:
    return [m for g in groups for m in g.modules if m not in (module, STAGE) and covers(module, m)]


def _gathered_inside(modules: Iterable[str], job: Job, groups: Sequence[Group]) -> Iterator[Problem]:
    """FSDP2 gathers weights before a module is called: nothing that a graph can do."""
    for m in modules:
        inner = _inner(m, groups)
        if inner:
            name = m or f"{STAGES}: a stage"
            text = f"{name} is one graph, and weights are gathered inside of it, for {some(inner)}"
            if job.parallel.comm_fusion.openstate:
                yield Problem(
                    MODULES, f"{text}; {AUTO} takes what is gathered as a whole", f"{MODULES}={AUTO}"
                )
            else:
                yield Problem(MODULES, f"{text}; fused, a block is gathered at once", f"{FUSED}=true")
            return


def _no_graph(asked: Compile, modules: Sequence[str], model: TracedModel) -> Iterator[Problem]:
    """What torch does not put in a graph."""
    effects, hooked = model.graph.effects, model.skeleton.traits.backward
    taken = _with(modules, [inner.module for inner in effects.inner])
    if taken:
        text = f"{taken}: the forward takes a gradient itself, of what is in no graph or in another"
        yield Problem(MODULES, f"{text}; name other modules", OFF)
    looks = _with(modules, model.graph.looks)
    if asked.fullgraph and looks:
        text = f"true: {looks}: the data decide what is done, which is no one graph"
        yield Problem(FULLGRAPH, text, f"{FULLGRAPH}=false")
    hooks = _with(modules, [h for h in hooked if h not in modules])  # its own are outside of it
    if asked.fullgraph and hooks:
        text = f"true: {hooks}: a module inside has a backward hook, which torch puts in no graph"
        yield Problem(FULLGRAPH, text, f"{FULLGRAPH}=false")


def _with(modules: Iterable[str], inside: Iterable[str]) -> str:
    """Those of ``modules`` that have one of ``inside`` in them, as text."""
    there = list(inside)
    return some([m or "each stage" for m in modules if any(covers(m, w) for w in there)])


def _rerun(modules: Iterable[str], model: TracedModel) -> Iterator[Problem]:
    """What a module that runs again keeps is chosen operation by operation, which a graph inside of it hides."""
    for r in model.recomputed:
        inner = [m for m in modules if m not in (STAGE, r.module) and covers(r.module, m)]
        if inner and r.policy == "selective":
            text = f"{some(inner)}: inside of {r.module}, of which parallel.recompute keeps results of operations"
            yield Problem(MODULES, f"{text}, and a graph hides them; compile {r.module}", f"{MODULES}={AUTO}")
            return


def _over_tp(modules: Sequence[str], model: TracedModel) -> Iterator[Problem]:
    """Operators that share what is brought in for them, and what torch cannot run again with them in a graph."""
    cut = [s.operator.module for s in model.operators.spreads]
    single = [m for m in modules if m in cut]
    if single:
        text = f"{some(single)}: cut over tp, it shares its input with the operators beside it"
        yield Problem(MODULES, f"{text}; compile the module around it", f"{MODULES}={AUTO}")
    for r in model.recomputed:
        around = [m for m in modules if covers(m, r.module) or covers(r.module, m)]
        if not around or not any(covers(r.module, operator) for operator in cut):
            continue
        if not r.comm:
            text = "keep: what a graph has received over tp is received again with it"
            yield Problem("parallel.recompute.comm", text, "parallel.recompute.comm=recompute")
            return
        if r.policy == "full":
            text = (
                f"{r.module} runs again and is cut over tp: as a graph it would send again what nobody needs"
            )
            yield Problem(
                MODULES, f"{text}; policy selective does not", "parallel.recompute.policy=selective"
            )
            return


def line(made: Compilation) -> str:
    """For the plan."""
    names = "each stage" if made.modules == (STAGE,) else listed(made.modules)
    mode = "" if made.mode == "default" else f" ({made.mode})"
    whole = "one graph each" if made.fullgraph else "eager where it cannot be compiled"
    shapes = {True: "any shape", False: "the planned shapes", None: "shapes as they come"}[made.dynamic]
    return f"{names} by {made.backend}{mode}: {whole}, for {shapes}; the first step may take {made.timeout_s:g} s"
