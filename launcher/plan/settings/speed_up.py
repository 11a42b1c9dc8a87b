"""The switches of a ``parallel_speed_up.json``, and what becomes of each here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from shlex import quote
from typing import Any, Literal

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.cost.fusion import DEFAULT, Fused, limits
from launcher.plan.cost.memory import bytes_text
from launcher.plan.operators.resolve import Spread
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.text import many

KEY = "parallel.transformer_opt"
BROADCAST = "dataset_broadcast_opt_level"
FUSION = "enable_communication_fusion"
GATHERING = "computation_allgather_overlap"
STRICT = "strict"
MATMUL, BIAS = "grad_matmul_communication_overlap", "allreduce_and_biasadd_swap"
OF_PLAN = (GATHERING, FUSION, MATMUL, BIAS)
"""Those that hang on what the plan sends together."""

FLAG, LEVEL, NAMES = "true or false", "a whole number from 0 to 3", "true, false or the names of operators"
SWITCHES = {
    "recomputation_communication_overlap": NAMES,
    MATMUL: NAMES,
    "grad_fa_allgather_overlap": FLAG,
    FUSION: FLAG,
    "grad_computation_allreduce_overlap": FLAG,
    GATHERING: FLAG,
    "computation_communication_fusion_level": LEVEL,
    BROADCAST: LEVEL,
    BIAS: FLAG,
    "enable_allreduce_slice_to_reducescatter": FLAG,
    "enable_interleave_split_concat_branch": FLAG,
    "enable_interleave_parallel_branch": FLAG,
}
"""The 12 that MindSpore documents, and what each may hold."""

FORMER = {
    "recompute_comm_overlap": "recomputation_communication_overlap",
    "matmul_grad_comm_overlap": MATMUL,
    "recompute_allgather_overlap_fagrad": "grad_fa_allgather_overlap",
    "enable_task_opt": FUSION,
    "enable_grad_comm_opt": "grad_computation_allreduce_overlap",
    "enable_opt_shard_comm_opt": GATHERING,
    "compute_communicate_fusion_level": "computation_communication_fusion_level",
    "bias_add_comm_swap": BIAS,
}
"""Names that MindSpore has given up, and the new ones."""


class FromFile(dict[str, Any]):
    """Switches that a file has: no override reaches one of them."""


Fate = Literal["applied", "satisfied", "degraded", "rejected"]


@dataclass(frozen=True)
class Switch:
    """One switch that is on (or a level that is given), and what becomes of it."""

    name: str
    value: str
    status: Fate
    why: str


def wrong(values: Mapping[str, Any], where: Callable[[str], str] = lambda _: "") -> Iterator[Problem]:
    """Unknown names and values of the wrong type; ``where(name)`` is the file and line that has it, if a file does."""
    for name, value in values.items():
        place = where(name)
        at = (lambda text, place=place: f"{place}: {text}") if place else (lambda text: text)
        key = KEY if place else f"{KEY}.{name}"
        said = f"{name} = {_written(value)}" if place else _written(value)
        expected = FLAG if name == STRICT else SWITCHES.get(name)
        if expected is None:
            yield _unknown(name, value, key, at, place)
        elif not _fits(expected, value):
            cure = "" if place else quote(f"{key}={'false' if expected != LEVEL else 0}")
            yield Problem(key, at(f"{said}: should be {expected}"), cure)


def _unknown(name: str, value: Any, key: str, at: Callable[[str], str], place: str) -> Problem:
    close = get_close_matches(name.lower(), [*SWITCHES, STRICT], 1)
    meant = FORMER.get(name) or (close[0] if close else None)
    text = f"unknown switch {name!r}" if place else "unknown switch"
    text += f", did you mean {meant!r}?" if meant else f" (there are: {', '.join(SWITCHES)})"
    cure = "" if place else " ".join([f"'~{key}'", *([f"{KEY}.{meant}={_written(value)}"] if meant else [])])
    return Problem(key, at(text), cure)


def _fits(expected: str, value: Any) -> bool:
    if expected == LEVEL:
        return type(value) is int and 0 <= value <= 3
    return isinstance(value, bool) or (expected == NAMES and isinstance(value, str) and bool(value.strip()))


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def given(job: Job) -> Mapping[str, Any]:
    """The switches of ``job``; those of a file have taken its place before."""
    values = job.parallel.transformer_opt
    return values if isinstance(values, Mapping) else {}


def broadcast_level(job: Job) -> int:
    """Where none is asked for, no sample is read twice by the ranks of one pipeline or tensor-parallel group."""
    level = given(job).get(BROADCAST, 3)
    assert isinstance(level, int)
    return level


def refused(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Switches that are wrong, that cannot be had here, or that ``strict`` does not want half done."""
    found = list(wrong(given(job)))
    yield from found
    if found or sizes is None:
        return
    early = [s for s in switches(job, sizes) if s.name not in OF_PLAN]
    yield from (_refusal(job, s, "") for s in early if s.status == "rejected")
    yield from _half_done(job, early)


def half_done(job: Job, sizes: Sizes, fused: Fused) -> list[Problem]:
    """Of those that hang on what the plan sends together, what ``strict`` does not want."""
    return list(_half_done(job, (s for s in switches(job, sizes, fused) if s.status == "degraded")))


def _half_done(job: Job, found: Iterable[Switch]) -> Iterator[Problem]:
    if given(job).get(STRICT) is True:
        yield from (_refusal(job, s, "strict: ") for s in found if s.status == "degraded")


def _refusal(job: Job, s: Switch, half: str) -> Problem:
    if isinstance(given(job), FromFile):
        return Problem(KEY, f"{s.name} = {s.value}: {half}{s.why}", f"{KEY}=null")
    cure = f"{KEY}.{s.name}={'0' if SWITCHES[s.name] == LEVEL else 'false'}"
    return Problem(f"{KEY}.{s.name}", f"{s.value}: {half}{s.why}", cure)


def switches(job: Job, sizes: Sizes, fused: Fused | None = None) -> tuple[Switch, ...]:
    """Every switch that is on, in MindSpore's order; ``fused`` is what the plan sends together, if there is one."""
    values = given(job)
    on = [(n, values[n]) for n in SWITCHES if n in values and (n == BROADCAST or values[n] not in (False, 0))]
    return tuple(Switch(n, _written(v), *_fate(n, v, job, sizes, fused)) for n, v in on)


def _fate(name: str, value: Any, job: Job, sizes: Sizes, fused: Fused | None) -> tuple[Fate, str]:
    if name == BROADCAST:
        return _broadcast(value, sizes)
    if name == "grad_computation_allreduce_overlap":
        return _reducing(job, sizes, fused)
    if name == GATHERING:
        return _gathering(job, sizes, fused)
    if name == FUSION:
        return _fusing(job, sizes, fused)
    if name in TENSOR and sizes.grid["tp"] == 1:
        return "satisfied", "no operator is cut: no such collective"
    if fused is not None and name == MATMUL and not any(c.phase == "backward" for s in fused.spreads for c in s.comms):
        return "satisfied", "no operator that is cut sends anything in backward"
    if fused is not None and name == BIAS and not any(_biased(s) for s in fused.spreads):
        return "satisfied", "no operator that is cut adds a bias to a sum"
    return ALWAYS[name]


ALWAYS: dict[str, tuple[Fate, str]] = {
    "recomputation_communication_overlap": (
        "degraded", "nothing is recomputed by the launcher; a model that checkpoints its own modules waits for their "
        "collectives",
    ),
    MATMUL: (
        "degraded", "both gradients of a matmul are computed first, then the collective starts",
    ),
    "grad_fa_allgather_overlap": ("rejected", "attention gathers no keys or values here: nothing to overlap"),
    "computation_communication_fusion_level": (
        "rejected", "a matmul that sends while it computes needs torch.compile and symmetric memory: not used",
    ),
    BIAS: ("degraded", "the bias is added after the all-reduce, once, so that it counts once"),
    "enable_allreduce_slice_to_reducescatter": (
        "satisfied", "a sum of which each rank keeps a slice is a reduce-scatter",
    ),
    "enable_interleave_split_concat_branch": ("degraded", "branches run one after the other, on one stream"),
    "enable_interleave_parallel_branch": ("degraded", "branches run one after the other, on one stream"),
}  # fmt: skip


def _biased(s: Spread) -> bool:
    return s.operator.mode == "row" and "bias" in dict(s.operator.weights)


TENSOR = (
    MATMUL, "computation_communication_fusion_level", BIAS,
    "enable_allreduce_slice_to_reducescatter", "enable_interleave_split_concat_branch",
)  # fmt: skip
"""Those about the collectives of operators that are cut."""


def _broadcast(level: int, sizes: Sizes) -> tuple[Fate, str]:
    if sizes.grid["pp"] * sizes.grid["tp"] == 1:
        return "satisfied", "a data-parallel rank is one rank, which reads for itself"
    if sizes.places[0] == sizes.places[-1] and sizes.grid["tp"] == 1:
        return "satisfied", "the first and the last stage are on one rank, which reads for itself"
    if sizes.places[0] == sizes.places[-1]:
        alone = "each tensor-parallel rank reads inputs and targets for itself"
        shared = "one rank of a tensor-parallel group reads, and sends the others what they use"
        return "applied", shared if level in (2, 3) else alone
    return "applied", {
        0: "the first stage reads inputs, the last targets, each tensor-parallel rank for itself",
        1: "the first stage reads inputs and targets and sends the last stage its targets",
        2: "the first stage reads inputs, the last targets, one rank for all of its tensor-parallel group",
        3: "one rank of a pipeline and tensor-parallel group reads, and sends the others what they use",
    }[level]


def _fusing(job: Job, sizes: Sizes, fused: Fused | None) -> tuple[Fate, str]:
    """Said of the plan's own groups and buckets; before there is one, of any."""
    if not job.parallel.comm_fusion.openstate:
        return "degraded", "parallel.comm_fusion.openstate=false: each collective carries one module or one parameter"
    if fused is not None and not fused.groups and not fused.buckets:
        nothing = "one data-parallel rank" if sizes.replicas == 1 else "no parameter learns"
        return "satisfied", f"{nothing}: nothing to sum or to gather"
    limit = limits(job.parallel.comm_fusion)
    size = "64 MB" if limit.reduce == DEFAULT else bytes_text(limit.reduce)
    whole = f"whole gradients travel in buckets of {size}"
    if limit.cuts is not None:
        whole = f"whole gradients travel in buckets that end before the parameters {', '.join(map(str, limit.cuts))}"
    if limit.gather is None:
        sharded = "sharded ones a group at a time"
    else:
        sharded = f"sharded ones in groups of up to {bytes_text(limit.gather)}"
    if fused is not None and not fused.groups:
        return "satisfied", whole
    if fused is not None and not fused.buckets:
        return "satisfied", f"every gradient is sharded; they travel {sharded.removeprefix('sharded ones ')}"
    return "satisfied", f"{whole}, {sharded}"


def _reducing(job: Job, sizes: Sizes, fused: Fused | None) -> tuple[Fate, str]:
    if sizes.replicas == 1:
        return "satisfied", "one data-parallel rank: no gradient travels"
    level = job.parallel.hsdp.optimizer_level if job.parallel.hsdp and sizes.grid["dp_shard"] > 1 else "level1"
    sharded = fused is None or any(len(g.idle) < len(g.names) for g in fused.groups)
    if level == "level1" or not sharded:
        return "degraded", "gradients are reduced after the last backward of a step"
    if fused is not None and fused.late:
        return "degraded", "a stage's gradients are reduced together, behind each weight-gradient action"
    if job.launch.device != "cuda":
        return _beside(job, "FSDP2 reduces each group beside backward")
    if fused is not None and fused.whole:
        text = f"FSDP2 reduces each group while backward goes on to the next; {many(fused.whole, 'whole parameter')}"
        return "degraded", f"{text} after the last backward of a step"
    return "satisfied", "FSDP2 reduces each group while backward goes on to the next"


def _gathering(job: Job, sizes: Sizes, fused: Fused | None) -> tuple[Fate, str]:
    if sizes.grid["dp_shard"] == 1 or (fused is not None and not fused.groups):
        return "satisfied", "no weight is sharded: nothing is gathered"
    assert job.parallel.hsdp is not None
    if job.parallel.hsdp.optimizer_level != "level3":
        return "degraded", "weights are gathered once a step, and a stage's first forward waits for all of its groups"
    if job.launch.device != "cuda":
        return _beside(job, "FSDP2 gathers the next group beside this one's computation")
    if fused is not None and all(n == 1 for n in Counter(g.stage for g in fused.groups).values()):
        return "degraded", "each stage is one group, which is gathered before it computes"
    return "satisfied", "FSDP2 gathers the next group while this one computes"


def _beside(job: Job, what: str) -> tuple[Fate, str]:
    if job.launch.device == "cpu":
        return "degraded", f"{what} on CUDA only; the CPU waits"
    return "degraded", f"{what} where launch.device=auto finds CUDA; on CPUs ranks wait"
