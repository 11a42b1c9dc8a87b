"""``parallel.recompute``: modules that run their forward again in the backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Recompute
from launcher.plan.cut.stages import around, covers
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.module_names import globs, listed, owner, uncallable
from launcher.plan.values.recomputed_module import Recomputed
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import many

KEY = "parallel.recompute"
MODULES = f"{KEY}.modules"
NEVER_CALLED = "its forward is never called"


def resolve(
    request: Recompute | None, skeleton: ModelStructure, leaves: tuple[str, ...] | None
) -> tuple[tuple[Recomputed, ...], list[Problem]]:
    """Returns the requested modules in definition order, without modules inside of other ones, and problems.

    Exact names beat globs, and later keys beat earlier ones. ``leaves``: the modules that stages do not
    divide; ``None`` with a single stage.
    """
    if request is None:
        return (), []
    policies = _policies(request)
    problems = list(uncallable(MODULES, request.modules, skeleton))
    if problems:
        return (), problems

    patterns = globs(policies)
    chosen: dict[str, str] = {}
    for module in skeleton.modules:
        key = _key(policies, patterns, module)
        inside = any(m in chosen for m in around(module))
        if key is not None and not inside and module not in skeleton.lists:
            chosen[module] = key
    each = {m for key in policies for m in [n for n, k in chosen.items() if k == key][:: request.every]}

    out = []
    for module in (m for m in skeleton.modules if m in each):
        keep = request.keep if policies[chosen[module]] == "selective" else ()
        out.append(Recomputed(module, keep, request.comm == "recompute"))
    cut = [r.module for r in out if leaves is not None and not any(covers(leaf, r.module) for leaf in leaves)]
    return tuple(out), [_over_stages(m, out, leaves or ()) for m in cut[:1]]


def undivided(
    request: Recompute | None, skeleton: ModelStructure, leaves: tuple[str, ...], stages: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns ``leaves`` with recomputed modules in place of the leaves inside of them, and these modules.

    A module is merged only if enough leaves with parameters remain for that number of ``stages``.
    """
    recomputed: list[str] = []
    loaded = {module for p in skeleton.params for module in around(p.name)}
    for module in (r.module for r in resolve(request, skeleton, None)[0]):
        inside = [leaf for leaf in leaves if covers(module, leaf)]
        if not inside or inside == [module]:
            continue
        merged = tuple(dict.fromkeys(module if leaf in inside else leaf for leaf in leaves))
        if sum(m in loaded for m in merged) >= stages:
            leaves = merged
            recomputed.append(module)
    return leaves, tuple(recomputed)


def _over_stages(module: str, recomputed: list[Recomputed], leaves: tuple[str, ...]) -> Problem:
    """Returns the problem of a module that is divided into several stages."""
    inside = listed([leaf for leaf in leaves if covers(module, leaf)])
    text = f"stages divide {module} (into {inside}), so no rank runs all of it; name modules inside it"
    names = ",".join(f"{module}.*" if r.module == module else r.module for r in recomputed)
    return Problem(MODULES, text, quote(f"{MODULES}=[{names}]"))


def _policies(request: Recompute) -> dict[str, str]:
    """Returns the policy of each name or glob."""
    if isinstance(request.modules, Mapping):
        return dict(request.modules)
    names = (request.modules,) if isinstance(request.modules, str) else request.modules
    return dict.fromkeys(names, request.policy)


def _key(policies: Mapping[str, str], patterns: Sequence[str], module: str) -> str | None:
    if module in policies:
        return module
    return next((key for key in patterns if fnmatchcase(module, key)), None)


def with_restored(recomputed: tuple[Recomputed, ...], graph: Graph) -> tuple[Recomputed, ...]:
    """Returns ``recomputed`` with the buffers to restore."""
    return tuple(replace(r, restored=_restored(r.module, graph)) for r in recomputed)


def not_repeatable(
    recomputed: tuple[Recomputed, ...], graph: Graph, skeleton: ModelStructure
) -> dict[str, str]:
    """Returns the modules whose second forward would differ from the first, and why."""
    weights = {p.name for p in skeleton.params if not p.buffer}
    compiled = skeleton.traits.compiled
    reasons = {
        r.module: next(_unlike(r.module, graph, weights), "")
        or _compiled(r.module, compiled)
        or _once(r, graph)
        for r in recomputed
    }
    return {module: why for module, why in reasons.items() if why}


def problems(
    recomputed: tuple[Recomputed, ...], wrong: Mapping[str, str], graph: Graph, skeleton: ModelStructure
) -> list[Problem]:
    """Returns the problems of modules that are ``wrong``; the cure names all others.

    In the place of a module that only contains modules which the model calls, it names these.
    """
    uncalled = {module for module, calls in graph.calls if calls == 0}
    others = []
    for r in recomputed:
        if wrong.get(r.module) == NEVER_CALLED:
            inside = [m for m in skeleton.modules if m.rpartition(".")[0] == r.module]
            others += [m for m in inside if m not in uncalled]
        elif r.module not in wrong:
            others.append(r.module)
    cure = quote(f"{MODULES}=[{','.join(others)}]") if others else f"{KEY}=null"
    text = "cannot be recomputed in the backward"
    return [Problem(MODULES, f"{module} {text}: {why}", cure) for module, why in wrong.items()]


def _compiled(module: str, compiled: tuple[str, ...]) -> str:
    """Returns why ``module`` cannot run twice, or "".

    The reason is that the model compiles it, a part of it or a module around it.
    """
    overlapping = [m for m in compiled if covers(m, module) or covers(module, m)]
    if not overlapping:
        return ""
    return f"the model has already compiled {overlapping[0] or 'itself'} (torch.compile)"


def _restored(module: str, graph: Graph) -> tuple[str, ...]:
    """Returns the buffers that a second forward of ``module`` would change, by their names inside of it."""
    changes = (c for c in graph.effects.changes if not (c.once or c.cached))
    names = (n for c in changes for n in c.names if covers(module, owner(n)))
    return tuple(n.removeprefix(f"{module}.") for n in names)


def _once(r: Recomputed, graph: Graph) -> str:
    """Returns why a selectively recomputed module cannot run twice.

    Kept results can be used in one more forward. Gradients that the forward itself computes need another.
    """
    if not r.keep or not graph.effects.inner_gradients:
        return ""
    return (
        "the forward computes gradients itself, but results that policy selective keeps can be used only once"
    )


def _unlike(module: str, graph: Graph, weights: set[str]) -> Iterator[str]:
    """Yields reasons why a second forward of ``module`` would differ from the first.

    ``weights``: the names of parameters, without buffers.
    """

    def here(name: str) -> bool:
        return covers(module, name)

    if dict(graph.calls).get(module, 1) == 0:
        yield NEVER_CALLED
    for c in graph.effects.changes:
        own = any(here(owner(n)) for n in c.names)
        used = c.read or c.kept or not weights.isdisjoint(c.names) or not own
        if (own or any(map(here, c.at))) and used and not (c.once or c.cached):
            yield f"the model changes {c.name} and uses it, so recomputation would use another value"
    for i in graph.effects.inner_gradients:
        if here(i.module):
            yield "it computes gradients itself"
    for name, what in graph.effects.inside_modes:
        if name == module:
            yield f"it is called under {what}, which is no longer active when it runs again"
    if any(map(here, graph.effects.saves_unfilled)):
        yield "it calls rrelu, and torch's checkpoint ends the second forward before rrelu draws its slopes"
    for name in graph.effects.grad_reads:
        if here(name):
            yield "it reads the .grad of a weight or buffer"
    for name, reader in graph.effects.versions:
        if here(reader):
            yield f"it reads the version of {name}, and does more in the first forward after an update"
    for reason, names in (
        ("changes an input in place", {*graph.overwrites, *graph.memory_writers}),
        ("changes a list or dictionary that it receives", graph.fills),
        ("returns a generator", graph.lazy),
        ("runs in inference mode", graph.inferred),
        ("is called with other weights than its own", graph.other_parameters),
    ):
        deep = reason.startswith(("returns", "is called"))
        if module in names or (deep and any(map(here, names))):
            yield f"it {reason}"
    backwards = (*(n.backward for n in graph.nodes), *(s.backward for s in graph.segments))
    for b in backwards:
        if changed := [what for name, what in b.twice if here(name)]:
            yield f"each of its forwards changes {changed[0]}"
        if module in b.unlike:
            yield "its second forward saved other tensors than the first"
    for name, _ in graph.requires_grad_changes:
        if here(owner(name)):
            yield f"the forward changes whether {name} requires a gradient"


def rows(job: Job, recomputed: tuple[Recomputed, ...]) -> Iterator[Setting]:
    """Yields the setting, if it is set."""
    if job.parallel.recompute is not None:
        named = listed(list(_policies(job.parallel.recompute)))
        run = "runs" if len(recomputed) == 1 else "run"
        why = f"{many(len(recomputed), 'module')} {run} again in the backward"
        yield Setting(KEY, named, "applied", why)
