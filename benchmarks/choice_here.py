"""Compares the layout that a search chooses with 40 layouts that are all trained on this machine.

The layouts of a language model are for 1, 2 and 4 ranks. For each number of ranks they include those that the
search ranks best; the others are drawn at random from all that the search considers. Layouts on the same
number of ranks take turns at every step, in the same processes, so that a machine that is slow for a minute
slows all of them. Calibrate the cluster first, and run both on an idle machine:

    python -m launcher launch.nproc=4 'steps=[calibrate]' steps.calibrate.to=mine/cluster/mine.yaml
    python -m benchmarks.choice_here --config-dir mine --cluster mine [--turns 3] [--steps 4] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.predict_here import MODEL, Measured, together, training, watched
from launcher.errors import RequestError
from launcher.extras.layout_search import candidates
from launcher.extras.layout_search.candidates import LayoutCandidate
from launcher.extras.layout_search.evaluate import SearchContext
from launcher.extras.layout_search.search import search
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.time.speeds import speeds
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import serving_from_here
from launcher.runtime.processes.start_and_restart import run_ranks

SIZES = (1, 2, 4)
FEW = 5
"""How many of the layouts that the search ranks best are trained, for each number of ranks."""
LIMIT = 0.05
"""How much slower the chosen layout may be than the best one on as many ranks."""


@dataclass(frozen=True)
class Tried:
    """A layout that was trained.

    ``ranks``: its number of ranks. ``chosen``: the search for this number of ranks ranks it best.
    """

    name: str
    ranks: int
    chosen: bool
    predicted: float
    measured: float


def left_open(size: int, cluster: str, config_dir: Path | None) -> Job:
    words = [*MODEL, f"launch.nproc={size}", "parallel=auto", f"search.measure={FEW}", f"cluster={cluster}"]
    return compose(words, config_dir=config_dir).job


def drawn(count: int, cluster: str, config_dir: Path | None) -> tuple[dict[str, tuple[Job, Plan]], set[str]]:
    """Return at most ``count`` layouts by name, and the names of those that a search chooses."""
    found: dict[str, tuple[Job, Plan]] = {}
    chosen, rest = set[str](), list[tuple[str, Job]]()
    for size in SIZES:
        job = left_open(size, cluster, config_dir)
        finalists, _ = search(job)
        for n, one in enumerate(finalists):
            name = named(size, one.predicted.layout)
            found[name] = one.job, plan_job(one.job)
            if n == 0:
                chosen.add(name)
        rest += others(size, job)

    # random other layouts, up to ``count``
    for name, job in random.Random(0).sample(rest, len(rest)):
        if len(found) == count:
            break
        if name not in found:
            plan = planned(job)
            if plan is not None:
                found[name] = job, plan
    return found, chosen


def others(size: int, job: Job) -> Iterator[tuple[str, Job]]:
    fast = speeds(job)
    assert fast is not None
    there = candidates.space(job)
    context = SearchContext(job, there.named, fast)
    for layout in there.layouts:
        settled = context.job_of(layout)
        parallel = settled.parallel.model_copy(update={"recompute": None})
        yield named(size, layout), settled.model_copy(update={"parallel": parallel})


def planned(job: Job) -> Plan | None:
    """Return the plan, or ``None`` if the planner refuses the layout."""
    try:
        return plan_job(job)
    except RequestError:
        return None


def named(size: int, layout: LayoutCandidate) -> str:
    shown = layout.shown()
    words = [f"{size} rank{'s' if size > 1 else ''}: tp {layout.tp}"]
    words += [f"{shown[key]} {what}" for key, what in (("stages", "stages"), ("micros", "micro batches"))]
    virtual = f", {layout.chunks} a rank" if layout.chunks > 1 else ""
    operators = f" {layout.operators}" if layout.tp > 1 else ""
    return f"{words[0]}{operators}, {words[1]} {layout.scheduler}{virtual}, {words[2]}, hsdp {shown['hsdp']}"


def in_turns(plans: Mapping[str, tuple[Job, Plan]], turns: int, steps: int) -> dict[str, Measured]:
    """Train ``steps`` steps of each layout, by number of ranks, and repeat this ``turns`` times."""
    each = []
    for _ in range(turns):
        found: dict[str, Measured] = {}
        for size in SIZES:
            of_size = {name: case for name, case in plans.items() if case[1].sizes.grid.size == size}
            ranks: list[dict[str, Measured]] = run_ranks(partial(work, cases=of_size, steps=steps), size)
            found |= ranks[0]
        each.append(found)
    return together(each)


def work(world: World, cases: Mapping[str, tuple[Job, Plan]], steps: int) -> dict[str, Measured]:
    """Time ``steps`` steps of each layout in turn, after two warm-up steps; memory is not measured."""
    timed = {name: training(world, *case)[0] for name, case in cases.items()}
    for _ in range(2):
        for step in timed.values():
            step()
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(steps):
        for name, step in timed.items():
            seen[name].append(watched(step))
    return {
        name: Measured(tuple(ms for ms, _ in found), tuple(o for _, o in found), held=())
        for name, found in seen.items()
    }


def tried(
    plans: Mapping[str, tuple[Job, Plan]], chosen: set[str], found: Mapping[str, Measured]
) -> list[Tried]:
    """Return the rows of the table, the fastest first."""
    out = []
    for name, (_, plan) in plans.items():
        step = plan.estimate.step
        assert step is not None
        out.append(Tried(name, plan.sizes.grid.size, name in chosen, step.seconds * 1e3, found[name].median))
    return sorted(out, key=lambda one: one.measured)


def of_each_size(rows: Sequence[Tried]) -> dict[int, float]:
    """Return for each number of ranks how much slower the chosen layout is than the best one.

    The first of ``rows`` is the fastest.
    """
    best = {one.ranks: one.measured for one in reversed(rows)}
    return dict(sorted((one.ranks, one.measured / best[one.ranks] - 1) for one in rows if one.chosen))


def lost(rows: Sequence[Tried], count: int) -> float:
    """Return how much slower the best of the ``count`` layouts predicted fastest is than the best of all."""
    first = sorted(rows, key=lambda one: one.predicted)[:count]
    return min(one.measured for one in first) / rows[0].measured - 1


def page(rows: Sequence[Tried], cluster: str) -> list[str]:
    off = [abs(one.predicted / one.measured - 1) for one in rows]
    mean = f"{statistics.mean(off):.1%}"
    each = ", ".join(f"{slower:.1%} on {ranks}" for ranks, slower in of_each_size(rows).items())
    table = []
    for one in rows:
        name = f"**{one.name}**" if one.chosen else one.name
        error = one.predicted / one.measured - 1
        table.append(f"| {name} | {one.predicted:.0f} | {one.measured:.0f} | {error:+.1%} |")
    return [
        "# What a search chooses on one machine",
        "",
        f"`python -m benchmarks.choice_here --cluster {cluster}`, {date.today()}: {len(rows)} layouts of a",
        f"language model, all of them trained, in turns; for each number of ranks the {FEW} that a search",
        "finds best, the first of them in bold, the others drawn at random.",
        "",
        f"The layouts in bold are slower than the best on as many ranks by {each}.",
        "How many ranks there are is not what a search chooses; over all of them the layout that is",
        f"predicted fastest is {lost(rows, 1):.1%} slower than the fastest, the best of {FEW} that run for",
        f"some steps {lost(rows, FEW):.1%}. Predictions are {mean} off on the mean.",
        "",
        "| layout | predicted ms | measured ms | error |",
        "|---|---|---|---|",
        *table,
    ]


def kept(path: Path | None, measured: Callable[[], dict[str, Measured]]) -> dict[str, Measured]:
    """Read the measurements from ``path``; if there are none, measure now and write them there."""
    if path is not None and path.exists():
        read: dict[str, Any] = json.loads(path.read_text())
        return {n: Measured(*map(tuple, (m["ms"], m["others"], m["held"]))) for n, m in read.items()}
    found = measured()
    if path is not None:
        path.write_text(json.dumps({n: asdict(m) for n, m in found.items()}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="here")
    parser.add_argument("--config-dir", type=Path, help="a folder with cluster/NAME.yaml")
    parser.add_argument("--layouts", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each layout, a turn")
    parser.add_argument(
        "--measured", type=Path, help="a JSON file to keep measurements in; one that is there is read"
    )
    parser.add_argument("--write", type=Path, help="a folder that gets choice_here.md")
    args = parser.parse_args()

    plans, chosen = drawn(args.layouts, args.cluster, args.config_dir)
    found = kept(args.measured, partial(in_turns, plans, args.turns, args.steps))
    rows = tried(plans, chosen, found)
    lines = page(rows, args.cluster)
    print("\n".join(lines))
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "choice_here.md").write_text("\n".join(lines) + "\n")
    if max(of_each_size(rows).values()) > LIMIT:
        raise SystemExit(f"a search's choice is more than {LIMIT:.0%} slower than the best on as many ranks")


if __name__ == "__main__":
    with serving_from_here():
        main()
