"""Shows a plan as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from textwrap import TextWrapper
from typing import TypeVar

from launcher.optional import matrices
from launcher.plan.communication.buckets_and_gathers import GatherGroup
from launcher.plan.cut.stages import BoundaryTensor, Stage, covers
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory.fits_cluster import tightest
from launcher.plan.plan import Plan
from launcher.plan.resolve import compile
from launcher.plan.show.operators import Rows, collectives_text, operator_rows
from launcher.plan.show.prediction import prediction_rows
from launcher.plan.show.terminal import PageRow, shares, shortened
from launcher.plan.show.timeline import text as drawn
from launcher.plan.time.traffic import KINDS
from launcher.plan.values.module_names import listed
from launcher.plan.values.recomputed_module import Recomputed
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import bytes_text, many, scaled, spans

WIDTH, LABEL, MOST_ROWS = 120, 12, 16
SHORT = 44
"""Lines of a short text: one page of a terminal."""
LEAST_LINES = {
    "time": 3, "notes": 4, "memory": 4, "settings": 2, "grid": 1, "model": 1, "batch": 1, "data": 1,
    "optimizer": 1, "lr": 1, "clipping": 1, "schedule": 4, "stages": 3, "operators": 3, "traffic": 3,
    "recompute": 1, "compile": 1, "sends": 1, "tied": 1, "hsdp": 1, "reduce": 1, "overlap": 1, "steps": 1,
}  # fmt: skip
"""The least lines of each section in a short text; the first sections get additional lines first."""
T = TypeVar("T")
K = TypeVar("K")


def text(plan: Plan) -> str:
    """Returns the full plan, the same bytes for the same job; no newline at the end."""
    sections = _sections(plan).items()
    return _page(plan, {label: [line for row in rows for line in row.lines] for label, rows in sections})


def short(plan: Plan, most: int = SHORT) -> str:
    """Returns ``text`` if it has at most ``most`` lines, else what people look for, in ``most`` lines.

    It takes more lines if it must: each row that ``_always_kept`` yields has one, and each section those of
    ``LEAST_LINES``.
    """
    sections = _sections(plan)
    lengths = {label: sum(len(row.lines) for row in rows) for label, rows in sections.items()}
    stay = {label: sum(row.stays for row in rows) + 1 for label, rows in sections.items()}
    least = {label: max(lines, stay.get(label, 0)) for label, lines in LEAST_LINES.items()}
    room = shares(lengths, least, most - 1)
    return _page(
        plan, {label: shortened(rows, room[label], WIDTH - LABEL) for label, rows in sections.items()}
    )


def _sections(plan: Plan) -> dict[str, list[PageRow]]:
    """Returns the wrapped rows of each label."""
    parts = (
        _head, _training, _pipeline, _stages, _recompute, _compile, _sends, _operators, _ties, _hsdp, _reduce,
        _overlap, _traffic, _memory, _time, _steps, _settings, _notes,
    )  # fmt: skip
    lines = TextWrapper(WIDTH - LABEL, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    stay = frozenset(_always_kept(plan))
    out: dict[str, list[PageRow]] = {}
    for label, row in (r for part in parts for r in part(plan)):
        out.setdefault(label, []).append(PageRow(tuple(lines.wrap(row)), (label, row) in stay))
    return out


def _always_kept(plan: Plan) -> Rows:
    """Yields the rows that a short text keeps before all others.

    These are the time, whether memory fits, degraded settings, and notes that are not about defaults.
    """
    yield from _time(plan)
    if plan.estimate.room is not None:
        yield "memory", str(tightest(plan.estimate.memory, plan.estimate.room))
    for s in plan.settings:
        if s.status == "degraded":
            yield "settings", _setting(s)
    for n in plan.notes:
        if not n.default:
            yield "notes", str(n)


def _page(plan: Plan, sections: Mapping[str, list[str]]) -> str:
    """Returns the text, with each label next to the first line of its section."""
    out = [f"plan of {plan.name}"]
    for label, lines in sections.items():
        out += [f"  {label if not i else '':<9} {line}" for i, line in enumerate(lines)]
    return "\n".join(out)


def _head(plan: Plan) -> Rows:
    sz = plan.sizes
    yield "grid", " x ".join(f"{axis} {n}" for axis, n in sz.grid.axes) + f" = {many(sz.grid.size, 'rank')}"
    total = sum(prod(p.spec.shape) for p in plan.params if not p.buffer)
    frozen = sum(prod(p.spec.shape) for p in plan.params if not p.buffer and not p.trainable)
    still = f", {_count(frozen)} of them frozen" if frozen else ""
    yield "model", f"{_count(total)} parameters{still}, {plan.precision}, seed {plan.seed}"
    parts = (
        many(sz.replicas, "data-parallel rank"),
        many(sz.micros, "micro batch"),
        many(sz.micro_batch, "sample"),
    )
    length = many(sz.steps, "step")
    if sz.epochs is not None:
        length = f"{many(sz.epochs, 'epoch')} = {length}"
    yield "batch", f"{many(sz.global_batch, 'sample')} = {' x '.join(parts)}; {length}"


def _training(plan: Plan) -> Rows:
    if plan.training is not None:
        yield from plan.training.lines()


def _pipeline(plan: Plan) -> Rows:
    sz, t = plan.sizes, plan.estimate.simulated
    if sz.grid["pp"] == 1:
        yield "schedule", f"one stage, {many(sz.micros, 'micro batch')} a step"
        return

    shape = "V-shaped" if sz.v else "interleaved"
    chunks = f" {shape}, {sz.chunks} chunks a rank" if sz.chunks > 1 else ""
    in_flight = ", ".join(map(str, t.in_flight)) if len(t.in_flight) <= 8 else f"at most {max(t.in_flight)}"
    sent = f"{many(t.messages, 'message')} a step; micro batches in flight: {in_flight}"
    yield "schedule", f"{plan.scheduler}{chunks}: bubble {t.bubble:.1%}, {sent}"
    if plan.pieces:
        lengths = ", ".join(map(str, plan.pieces))
        yield "schedule", f"sequences pass in {len(plan.pieces)} pieces of {lengths} positions"

    # the drawn schedule has one row per pipeline rank; of many rows, the first and the last ones
    bars = [line[line.index("|") :] for line in drawn(t, 64).splitlines()]
    names = [_on(sz.grid.ranks(pp=pp)) for pp in range(len(bars))]
    lines = [f"{name:<{max(map(len, names))}} {bar}" for name, bar in zip(names, bars, strict=True)]
    if len(lines) > MOST_ROWS:
        half = MOST_ROWS // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} rows more ...", *lines[-half:]]
    for line in lines:
        yield "schedule", line


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def _stages(plan: Plan) -> Rows:
    """Yields what stages run; consecutive equal stages share a row."""
    first = {n: p for p in plan.params for n in p.names}
    halves = any(a.kind == "I" for row in plan.schedule for a in row)
    rows = []
    for s in plan.stages:
        cost = f"{_count(_size(s, first))} parameters, {_count(s.flops, 'FLOP')} forward a micro batch"
        if halves:
            cost += f", {s.deferred / max(2 * s.flops, 1):.0%} of its backward deferred"
        rows.append((s, cost))

    # consecutive stages share a row if costs are equal and module names differ only in their numbers
    for (cost, modules), same in _runs(rows, lambda row: (row[1], tuple(map(_glob, row[0].modules)))):
        stages = [s for s, _ in same]
        names = "the full model" if plan.leaves is None else "no module"
        if any(modules):
            names = listed([m for s in stages for m in s.modules])

        # several stages: the figures are for each of them, the ranks for all
        each = " each" if len(stages) > 1 else ""
        if each and modules:
            names += f", {many(len(modules), 'module')} each"
        places = {plan.sizes.places[s.index] for s in stages}
        ranks = sorted(r for pp in places for r in plan.sizes.grid.ranks(pp=pp))
        yield "stages", f"{spans([s.index for s in stages])} on {_on(ranks)}: {names}; {cost}{each}"


def _size(stage: Stage, first: Mapping[str, Placed]) -> int:
    """Returns the parameter elements of ``stage``, without buffers; ties count once.

    ``first``: parameters by all their names.
    """
    own = {first[n].name: first[n] for n in stage.params}
    return sum(prod(p.spec.shape) for p in own.values() if not p.buffer)


def _glob(module: str) -> str:
    """
    >>> _glob("layers.11.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _recompute(plan: Plan) -> Rows:
    """Yields what stages run again in their backward; consecutive equal stages share a row."""
    # what each stage runs again, and at what cost
    rows = []
    for s, cost in zip(plan.stages, plan.estimate.rerun, strict=True):
        single_stage = plan.leaves is None
        here = [r for r in plan.recomputed if single_stage or any(covers(m, r.module) for m in s.modules)]
        costs = [f"{bytes_text(cost.spared)} less", f"{cost.flops / max(s.flops, 1):.0%} of a forward more"]
        if cost.sent:
            costs.append(f"{collectives_text(cost.sent)} again")
        rows.append((s.index, here, ", ".join(costs)))

    # one line for consecutive stages of the same cost; it groups modules that keep the same
    for more, same in _runs([row for row in rows if row[1]], lambda row: row[2]):
        modules = [r for _, here, _ in same for r in here]
        named = [(r.module, _way(r, compiled=plan.compilation is not None)) for r in modules]
        ways = dict.fromkeys(way for _, way in named)
        description = "; ".join(listed([module for module, its in named if its == way]) + way for way in ways)
        each = " each" if len(same) > 1 else ""
        yield (
            "recompute",
            f"{_where(index for index, _, _ in same)}: {description}: {more} a micro batch{each}",
        )


def _way(r: Recomputed, compiled: bool) -> str:
    kept = [*r.keep, *([] if r.comm else ["what is sent over tp"])]
    slower = (
        f" (by dispatch modes, slower: {', '.join(r.by_operation)})"
        if r.by_operation and not compiled
        else ""
    )
    return f", keeping {', '.join(kept)}{slower}" if kept else ""


def _sends(plan: Plan) -> Rows:
    """Yields what each stage sends to the next; consecutive equal boundaries share a row."""
    places = plan.sizes.places
    boundaries = range(len(plan.stages) - 1)
    rows = [(s, plan.boundaries[s], places[s] == places[s + 1]) for s in boundaries]
    for (specs, stays), same in _runs(rows, lambda row: (tuple(c.specs for c in row[1]), row[2])):
        tensors = ", ".join(f"{t.dtype}{list(t.shape)}" for spec in specs for t in spec) or "nothing"
        size = sum(t.nbytes for spec in specs for t in spec)

        # name the boundaries by the stages around them; a single one also lists its values
        start, crossing, _ = same[0]
        end = same[-1][0]
        where = f"{start} -> {start + 1}" + (f" .. {end} -> {end + 1}" if end > start else "")
        names = f"{_crossings(crossing)} " if end == start and crossing else ""
        each = " each" if end > start else ""
        on = ", handed on within the rank" if stays else ""
        yield "sends", f"{where}: {names}{tensors}, {bytes_text(size)} a micro batch{each}{on}"


def _crossings(crossing: tuple[BoundaryTensor, ...]) -> str:
    return ", ".join(c.name for c in crossing)


def _ties(plan: Plan) -> Rows:
    params = {p.name: p for p in plan.params}
    for t in plan.ties:
        p = params[t.name]
        at = ", ".join(map(str, t.stages))
        one = len(t.ranks) == 1 and not p.sharded
        summed = "gradients summed" if t.trained else "frozen"
        description = f"one copy, all on {_on(plan.sizes.grid.ranks(pp=t.ranks[0]))}" if one else summed
        yield "tied", f"{' = '.join(p.names)} on stages {at}: {description}, counted and saved once"


def _hsdp(plan: Plan) -> Rows:
    if plan.hsdp is None:
        return
    count = sum(p.sharded for p in plan.params)
    over = many(plan.sizes.grid["dp_shard"], "rank")
    if not count:
        yield "hsdp", f"{plan.hsdp.optimizer_level}: no parameter is sharded over {over}"
        return

    # the total, then one row for consecutive equal groups
    sharded = many(count, "parameter")
    groups = many(len(plan.groups), "group")
    yield "hsdp", f"{plan.hsdp.optimizer_level}: {sharded} over {over}, gathered in {groups}"
    for (n, size, _), same in _runs(plan.groups, lambda g: (len(g.names), g.nbytes, len(g.modules))):
        each = " each" if len(same) > 1 else ""
        description = f"{many(n, 'parameter')}, {bytes_text(size)}{each}"
        yield "hsdp", f"{_where(g.stage for g in same)}: {_group(same)}, {description}"


def _group(same: list[GatherGroup]) -> str:
    return listed([m or "the rest" for g in same for m in g.modules])


def _reduce(plan: Plan) -> Rows:
    for (n, size), same in _runs(plan.buckets, lambda b: (len(b.names), b.nbytes)):
        description = f"{many(n, 'unsharded parameter')}, {bytes_text(size)}"
        stages = {b.stage for b in same}
        often = f"{len(same)} all-reduces" if len(same) > len(stages) else "one all-reduce"
        yield "reduce", f"{_where(stages)}: {description}, {often} a step{' each' if len(same) > 1 else ''}"
    for b in plan.sums:
        description = f"{many(len(b.names), 'unsharded parameter')} with partial gradients"
        yield (
            "reduce",
            f"stage {b.stage}: {description}, {bytes_text(b.nbytes)}, one all-reduce over tp a step",
        )


def _overlap(plan: Plan) -> Rows:
    """Yields which communication overlaps with computation: of weights, of gradients and over ``tp``."""
    if plan.overlaps:
        yield "overlap", "; ".join(plan.overlaps)


def _operators(plan: Plan) -> Rows:
    yield from operator_rows(plan.operators, plan.output, plan.sizes.grid["tp"])
    if plan.sharding is not None:
        yield from matrices.sharding_rows(plan.sharding)


def _compile(plan: Plan) -> Rows:
    if plan.compilation is not None:
        yield "compile", compile.line(plan.compilation)


def _traffic(plan: Plan) -> Rows:
    """Yields how many collectives of each kind one step runs, and their bytes.

    Consecutive equal ranks share a row.
    """
    kinds = [k for k in KINDS if any(t.kind == k for t in plan.estimate.traffic)]
    if plan.sizes.grid.size == 1:
        return
    by_rank_and_kind = {(t.rank, t.kind): f"{t.count}: {bytes_text(t.nbytes)}" for t in plan.estimate.traffic}
    rows = [(r, tuple(by_rank_and_kind.get((r, k), "-") for k in kinds)) for r in range(plan.sizes.grid.size)]
    folded = [(spans([r for r, _ in same]), cells) for cells, same in _runs(rows, lambda row: row[1])]
    wide = max(len("ranks"), *(len(ranks) for ranks, _ in folded))
    yield "traffic", f"{'ranks':<{wide}}" + "".join(f"{k.replace('_', '-'):>16}" for k in kinds)
    for ranks, cells in folded:
        yield "traffic", f"{ranks:<{wide}}" + "".join(f"{c:>16}" for c in cells)


def _memory(plan: Plan) -> Rows:
    """Yields the bytes of each rank; consecutive equal ranks share a row."""
    titles = ("params", "grads", "optimizer", "gathered", "activations", "total")
    rows = [(m.rank, tuple(getattr(m, title) for title in titles)) for m in plan.estimate.memory]
    folded = [(spans([r for r, _ in same]), cells) for cells, same in _runs(rows, lambda row: row[1])]
    wide = max(len("ranks"), *(len(ranks) for ranks, _ in folded))
    yield "memory", f"{'ranks':<{wide}}" + "".join(f"{t:>12}" for t in titles)
    for ranks, cells in folded:
        yield "memory", f"{ranks:<{wide}}" + "".join(f"{bytes_text(c):>12}" for c in cells)
    if plan.estimate.room is not None:
        yield "memory", str(tightest(plan.estimate.memory, plan.estimate.room))


def _time(plan: Plan) -> Rows:
    yield from prediction_rows(plan.estimate.step)


def _steps(plan: Plan) -> Rows:
    where = {
        "ranks": f"on {many(plan.sizes.grid.size, 'rank')}",
        "alone": "in one process",
        "files": "on files, no torch",
    }
    for phase in plan.phases:
        yield "steps", f"{where[phase.where]}: {', '.join(phase.steps)}"


def _settings(plan: Plan) -> Rows:
    for s in plan.settings:
        yield "settings", _setting(s)


def _setting(s: Setting) -> str:
    return f"{s.key}={s.value}: {s.status}, {s.why}"


def _notes(plan: Plan) -> Rows:
    for n in plan.notes:
        yield "notes", str(n)


def _runs(items: Iterable[T], key: Callable[[T], K]) -> Iterator[tuple[K, list[T]]]:
    """Groups consecutive items that have equal keys."""
    return ((k, list(same)) for k, same in groupby(items, key))


def _where(stages: Iterable[int]) -> str:
    indices = sorted(set(stages))
    return f"stage{'s' if len(indices) > 1 else ''} {spans(indices)}"


def _count(n: float, unit: str = "") -> str:
    """
    >>> _count(950), _count(1_234_567), _count(2_000_000, "FLOP")
    ('950', '1.2M', '2.0 MFLOP')
    """
    number, prefix = scaled(n)
    return f"{number} {prefix}{unit}" if unit else number + prefix
