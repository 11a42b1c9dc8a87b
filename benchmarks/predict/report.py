"""Writes predict.md: errors of each table, how good choices are, the worst rows, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import mean, median

from benchmarks.predict import scatter
from benchmarks.predict.choice import cells, out_of_memory
from benchmarks.predict.frameworks import FITTED, MANY, SET_BY_HAND, STEP_MS, WAIT_MS, WIDE
from benchmarks.predict.plans import Planned, key
from benchmarks.predict.values import Compared, compared, seconds, step, timed

NAME, PICTURES = "predict.md", "results"
ROOM = 80
"""GB of a device; a run that failed should be predicted to need more."""
CONSTANTS_NOTE = (
    "The constants set by hand, and the network of `megatron_deepspeed` (`vtrain_multi`), were chosen while",
    "looking at all tables. Its other constants and those of `megatron` are fitted on half of the models,",
    "those of `nanotron` on all but `3b`, and rounded: the errors above are not those of a blind test.",
    f"Runs of nanotron are of two kinds, which differ in time and memory: on {MANY} devices and more, with",
    f"one stage and tp of 2 to {WIDE}, collectives over tp wait for the host: {WAIT_MS:g} ms per layer",
    "and rank of tp in each pass. The table does not name the kind of a run; this rule was derived from it.",
    f"With one stage on so many devices a step takes {STEP_MS:g} ms more; both times are fitted to them.",
)
"""Where the constants come from."""


def write(folder: Path, rows: Sequence[dict[str, str]], plans: dict[str, Planned | str]) -> None:
    """Write predict.md to ``folder``, and results/predict_SOURCE.svg for each source with times."""
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    times = timed(rows, plans)
    sources = sorted({c.raw["source"] for c in times})
    for source in sources:
        found = [c for c in times if c.raw["source"] == source]
        points = [(seconds(c), step(c.plan).seconds) for c in found]
        drawn = scatter.svg(points, f"{source}: a step", "s")
        (folder / PICTURES / f"predict_{source}.svg").write_text(drawn)
    text = [
        "# Predicted and measured",
        "",
        f"Generated {date.today()} by `python -m benchmarks.predict IN.csv OUT.csv --report benchmarks`:",
        "each row of the table becomes a request, and the launcher's planner plans it. The predictions are",
        "those that `show=plan` prints.",
        "",
        *_times(times, sources),
        *_memory(rows, plans),
        *_choice([c for c in times if c.raw["source"] == "ultrascale"]),
        *_failed(rows, plans),
        *_constants(),
        *_worst(times),
        *_without(rows, plans),
        *(f"![{source}]({PICTURES}/predict_{source}.svg)" for source in sources),
    ]
    (folder / NAME).write_text("\n".join(text) + "\n")


def _times(times: Sequence[Compared], sources: Sequence[str]) -> Iterator[str]:
    yield from ("## Time of a step", "", "| table | rows | mean error | median | off by more than twice |")
    yield "|---|---|---|---|---|"
    for source in sources:
        off = [step(c.plan).seconds / seconds(c) for c in times if c.raw["source"] == source]
        errors = [abs(x - 1) for x in off]
        twice = sum(x > 2 or x < 0.5 for x in off) / len(off)
        yield f"| {source} | {len(off)} | {mean(errors):.1%} | {median(errors):.1%} | {twice:.1%} |"
    yield ""


def _memory(rows: Sequence[dict[str, str]], plans: dict[str, Planned | str]) -> Iterator[str]:
    yield from ("## Memory", "", "| table | metric | rows | mean error | median |", "|---|---|---|---|---|")
    metrics = ("memory", "activation_memory", "params_grads_optimizer_memory")
    found = compared(rows, plans, metrics)
    for source, metric in sorted({(c.raw["source"], c.raw["metric"]) for c in found}):
        errors = [abs(c.error) for c in found if (c.raw["source"], c.raw["metric"]) == (source, metric)]
        yield f"| {source} | {metric} | {len(errors)} | {mean(errors):.1%} | {median(errors):.1%} |"
    yield ""
    yield "`memory` has only runs that succeeded, so no value exceeds the memory of the device."
    yield ""


def _choice(found: Sequence[Compared]) -> Iterator[str]:
    if not found:
        return
    yield from (
        "## Choice",
        "",
        "Speed lost against the best measured layout of the model on these devices.",
        "",
    )
    yield "| model | devices | layouts | first pick | best of five | hand rule |"
    yield "|---|---|---|---|---|---|"
    there = cells(found)
    for c in there:
        yield f"| {c.model} | {c.ranks} | {c.layouts} | {c.first:.1%} | {c.five:.1%} | {c.hand:.1%} |"
    for name, of in (("mean", mean), ("median", median)):
        first, five, hand = (of([getattr(c, k) for c in there]) for k in ("first", "five", "hand"))
        yield f"| **{name}** | | | {first:.1%} | {five:.1%} | {hand:.1%} |"
    yield ""


def _failed(rows: Sequence[dict[str, str]], plans: dict[str, Planned | str]) -> Iterator[str]:
    mine = [r for r in rows if r["source"] == "ultrascale"]
    failed = [c for c in compared(mine, plans, ("failed",)) if c.measured]
    if not failed:
        return
    found = out_of_memory(compared(mine, plans, ("memory",)), failed, ROOM * 1e9)
    yield from (
        "## Out of memory",
        "",
        f"A run is predicted to fail if it needs more than {ROOM} GB, with the overhead of the allocator.",
    )
    yield f"{found.failed} runs failed, for whatever reason:"
    yield f"precision {found.precision:.3f}, recall {found.recall:.3f}."
    yield ""


def _constants() -> Iterator[str]:
    yield from (
        "## Constants",
        "",
        "Those of `conf/cluster`, and those of each framework.",
        *CONSTANTS_NOTE,
        "",
    )
    yield from ("| framework | set by hand | fitted |", "|---|---|---|")
    for name in FITTED:
        said, fitted = (
            ", ".join(f"{k} {v:.3g}" for k, v in of[name].items()) for of in (SET_BY_HAND, FITTED)
        )
        yield f"| {name} | {said or '-'} | {fitted or '-'} |"
    yield ""


def _worst(times: Sequence[Compared]) -> Iterator[str]:
    yield from ("## The worst ten", "", "| table | model | layout | measured | predicted | largest term |")
    yield "|---|---|---|---|---|---|"
    order = sorted(times, key=lambda c: -_factor(c))
    for c in order[:10]:
        row, found = c.plan.row, step(c.plan)
        largest = max(found.terms, key=lambda t: t.seconds)
        layout = f"tp {row.tp} pp {row.pp} dp {row.dp} micro batch {row.micro} ZeRO-{row.zero}"
        took = f"{seconds(c):.2f} s | {found.seconds:.2f} s | {largest.name} {largest.seconds:.2f} s"
        yield f"| {row.raw['source']} | {row.raw['model']} | {layout} | {took} |"
    yield ""


def _factor(c: Compared) -> float:
    off = step(c.plan).seconds / seconds(c)
    return max(off, 1 / off)


def _without(rows: Sequence[dict[str, str]], plans: dict[str, Planned | str]) -> Iterator[str]:
    why: dict[str, int] = {}
    for raw in rows:
        plan = plans[key(raw)]
        if isinstance(plan, str):
            short = plan.split(":")[0] if plan.startswith("parallel") else plan
            why[short] = why.get(short, 0) + 1
    yield from ("## Rows without a prediction", "", "| why | rows |", "|---|---|")
    for text, count in sorted(why.items(), key=lambda item: -item[1])[:20]:
        yield f"| {text} | {count} |"
    yield ""
