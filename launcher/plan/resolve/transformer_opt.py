"""``parallel.transformer_opt``: the switches of a ``parallel_speed_up.json``, and the effect of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from shlex import quote
from typing import Any, Literal

from launcher.errors import Problem
from launcher.job.schema.base import yaml_text
from launcher.job.schema.did_you_mean import did_you_mean
from launcher.job.schema.job import Job
from launcher.plan.communication.buckets_and_gathers import Communication
from launcher.plan.resolve import comm_fusion, overlap
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel import input_gradients
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator, all_reduced
from launcher.plan.values.resolved import SwitchesFile
from launcher.plan.values.setting import Setting, Status
from launcher.plan.values.text import bytes_text

KEY = "parallel.transformer_opt"
SHOWN = 20
"""The number of wrong entries of a file that are reported one by one."""
STRICT, FILE = "strict", "file"

BROADCAST = "dataset_broadcast_opt_level"
FUSION = "enable_communication_fusion"
GATHERING = "computation_allgather_overlap"
REDUCING = "grad_computation_allreduce_overlap"
RERUNNING = "recomputation_communication_overlap"
MATMUL = "grad_matmul_communication_overlap"
SLICED_MATMUL = "computation_communication_fusion_level"
BIAS = "allreduce_and_biasadd_swap"
SLICED_SUM = "enable_allreduce_slice_to_reducescatter"
BRANCHES = "enable_interleave_split_concat_branch"

OF_PLAN = (GATHERING, FUSION, MATMUL, BIAS)
"""The switches whose outcome depends on the plan's fused collectives."""

FLAG, LEVEL = "true or false", "a whole number from 0 to 3"
NAMES = "true, false or some of AllReduce,ReduceScatter,AllGather,AlltoAll"
SWITCHES = {
    RERUNNING: NAMES,
    MATMUL: NAMES,
    "grad_fa_allgather_overlap": FLAG,
    FUSION: FLAG,
    REDUCING: FLAG,
    GATHERING: FLAG,
    SLICED_MATMUL: LEVEL,
    BROADCAST: LEVEL,
    BIAS: FLAG,
    SLICED_SUM: FLAG,
    BRANCHES: FLAG,
    "enable_interleave_parallel_branch": FLAG,
}
"""The 12 switches that MindSpore documents, and the values that each accepts."""

FORMER = {
    "recompute_comm_overlap": RERUNNING,
    "matmul_grad_comm_overlap": MATMUL,
    "recompute_allgather_overlap_fagrad": "grad_fa_allgather_overlap",
    "enable_task_opt": FUSION,
    "enable_grad_comm_opt": REDUCING,
    "enable_opt_shard_comm_opt": GATHERING,
    "compute_communicate_fusion_level": SLICED_MATMUL,
    "bias_add_comm_swap": BIAS,
}
"""Former names of switches in MindSpore, and the current ones."""


SwitchStatus = Status | Literal["rejected"]
SwitchOutcome = tuple[SwitchStatus, str]


@dataclass(frozen=True)
class Switch:
    """One switch that is on (or a level that is set), and its outcome."""

    name: str
    value: str
    status: SwitchStatus
    why: str


def wrong(values: Mapping[str, Any], where: Callable[[str], str] | None = None) -> Iterator[Problem]:
    """Yields problems for unknown names and for values of the wrong type.

    ``where(name)`` returns the file and line of a switch; ``None`` if the switches come from the request.
    """
    kinds = {name: FLAG if name == STRICT else SWITCHES.get(name) for name in values}
    if where is None:
        kinds.pop(FILE, None)  # the path of a file, whose switches are read elsewhere
    bad = [name for name, kind in kinds.items() if kind is None or not _fits(kind, values[name])]
    for name in bad[:SHOWN]:
        value, expected = values[name], kinds[name]
        if where is None:
            yield _unknown(name, value) if expected is None else _misfit(name, value, expected)
        elif expected is None:
            yield Problem(KEY, f"{where(name)}: unknown switch {name!r}{_hint(name)}")
        else:
            yield Problem(KEY, f"{where(name)}: {name} = {yaml_text(value)}: should be {expected}")
    if len(bad) > SHOWN:
        yield Problem(KEY, f"{len(bad) - SHOWN} more of its {len(values)} entries are wrong")


def _misfit(name: str, value: Any, expected: str) -> Problem:
    key, off = f"{KEY}.{name}", "0" if expected == LEVEL else "false"
    return Problem(key, f"{yaml_text(value)}: should be {expected}", quote(f"{key}={off}"))


def _unknown(name: str, value: Any) -> Problem:
    key, meant = f"{KEY}.{name}", _meant(name)
    words = [f"'~{key}'"]
    if meant is not None:
        words.append(f"{KEY}.{meant}={yaml_text(value)}")
    return Problem(key, f"unknown switch{_hint(name)}", " ".join(words))


def _meant(name: str) -> str | None:
    """Returns the switch that replaces ``name``, or else the one with the most similar name."""
    close = get_close_matches(name.lower(), [*SWITCHES, STRICT], 1)
    return FORMER.get(name) or (close[0] if close else None)


def _hint(name: str) -> str:
    meant = _meant(name)
    return f" (options: {', '.join(SWITCHES)})" if meant is None else did_you_mean(meant)


def _fits(expected: str, value: Any) -> bool:
    if expected == LEVEL:
        return type(value) is int and 0 <= value <= 3
    named = expected == NAMES and isinstance(value, str) and input_gradients.known(value)
    return isinstance(value, bool) or named


def switches_of(job: Job) -> Mapping[str, Any]:
    """Returns the switches of ``job``; the path of a file has been replaced by its switches before."""
    values = job.parallel.transformer_opt
    return values if isinstance(values, Mapping) else {}


def file_of(job: Job) -> tuple[str | None, Mapping[str, Any]]:
    """Returns the file of switches that ``job`` names, and the switches that it sets itself."""
    values = job.parallel.transformer_opt
    if isinstance(values, Mapping):
        return values.get(FILE), {name: value for name, value in values.items() if name != FILE}
    return values, {}


def broadcast_level(job: Job) -> int:
    """Returns the level of broadcasts.

    By default one rank reads for its full pipeline and tensor-parallel group.
    """
    level = switches_of(job).get(BROADCAST, 3)
    assert isinstance(level, int)
    return level


def swaps_bias(job: Job) -> bool:
    """Returns true if a bias is added before an all-reduce."""
    return switches_of(job).get(BIAS) is True


def gathers_ahead(job: Job) -> bool:
    """Returns true if weights are gathered ahead of their use; the default is yes."""
    return switches_of(job).get(GATHERING, True) is True


def reduces_early(job: Job) -> bool:
    """Returns true if gradients are reduced during the backward; the default is yes."""
    return switches_of(job).get(REDUCING, True) is True


def overlapped(job: Job, fused: Communication) -> tuple[str, ...]:
    """Returns modules whose input gradient is sent while their weight gradient is computed."""
    return fused.input_gradients(_collectives(job)).beside


def _collectives(job: Job) -> frozenset[str]:
    """Returns the collectives whose overlap with weight gradients is requested."""
    return input_gradients.named(switches_of(job).get(MATMUL, False))


def overlaps(job: Job, sizes: Sizes, fused: Communication) -> tuple[str, ...]:
    """Describes which collectives overlap with computation and which do not, also for default switches."""
    ops = _collectives(job)
    gathers, reduces = gathers_ahead(job), reduces_early(job)
    return tuple(overlap.lines(job, sizes, fused, gathers=gathers, reduces=reduces, ops=ops))


def problems(job: Job, sizes: Sizes | None, file: SwitchesFile | None) -> Iterator[Problem]:
    """Yields problems for invalid switches, unsupported ones, and degraded ones if ``strict`` is set."""
    invalid = list(wrong(switches_of(job)))
    yield from invalid
    if invalid or sizes is None:
        return
    early = [s for s in switches(job, sizes, None) if s.name not in OF_PLAN]
    yield from (_refusal(s, file, "") for s in early if s.status == "rejected")
    yield from _half_done(job, early, file)


def param_problems(
    job: Job, sizes: Sizes, fused: Communication, file: SwitchesFile | None
) -> Iterator[Problem]:
    """Yields the problems of ``strict`` for all switches, once the fused collectives are known."""
    return _half_done(job, switches(job, sizes, fused), file)


def _half_done(job: Job, candidates: Iterable[Switch], file: SwitchesFile | None) -> Iterator[Problem]:
    if switches_of(job).get(STRICT) is True:
        yield from (_refusal(s, file, "strict: ") for s in candidates if s.status == "degraded")


def gathered(job: Job, names: Iterable[str], file: SwitchesFile | None) -> list[Problem]:
    """Returns problems for operators that work on gathered tensors, which ``strict`` forbids."""
    if switches_of(job).get(STRICT) is not True:
        return []
    key, text, cure = _place(file, STRICT, "true", "false")
    return [
        Problem(key, f"{text}: an operator works on gathered tensors: {operator}", cure) for operator in names
    ]


def _refusal(s: Switch, file: SwitchesFile | None, half: str) -> Problem:
    key, text, cure = _place(file, s.name, s.value, "0" if SWITCHES[s.name] == LEVEL else "false")
    return Problem(key, f"{text}: {half}{s.why}", cure)


def _place(file: SwitchesFile | None, name: str, value: str, off: str) -> tuple[str, str, str]:
    """Returns the key that set ``name``, the start of a message, and the override that sets it to ``off``."""
    cure = f"{KEY}.{name}={off}"
    if file is not None and name not in file.typed:
        return KEY, f"{name} = {value}", f"{quote(f'{KEY}={file.path}')} {cure}"
    return f"{KEY}.{name}", value, cure


def rows(job: Job, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields one row per switch; rejected switches have been refused before."""
    for s in switches(job, sizes, fused):
        assert s.status != "rejected", s
        yield Setting(f"{KEY}.{s.name}", s.value, s.status, s.why)


def switches(job: Job, sizes: Sizes, fused: Communication | None) -> tuple[Switch, ...]:
    """Returns every switch that is on, in MindSpore's order; ``fused``: the fused collectives, if known."""
    values = switches_of(job)
    on = [n for n in SWITCHES if n in values and (n == BROADCAST or values[n] not in (False, 0))]
    return tuple(
        Switch(n, yaml_text(values[n]), *_outcome(n, values[n], job, sizes, fused=fused)) for n in on
    )


def _outcome(name: str, value: Any, job: Job, sizes: Sizes, *, fused: Communication | None) -> SwitchOutcome:
    if name == BROADCAST:
        return _broadcast(value, sizes)
    if name in OUTCOMES:
        return OUTCOMES[name](job, sizes, fused)
    if name in TENSOR and sizes.grid["tp"] == 1:
        return "satisfied", "no operator is cut over tp, so this plan has no such collective"
    if fused is not None and name == BIAS and not any(map(_biased, fused.spreads)):
        return "satisfied", "no operator that is cut adds a bias to what it all-reduces"
    return ALWAYS[name]


ALWAYS: dict[str, SwitchOutcome] = {
    "grad_fa_allgather_overlap": (
        "rejected",
        "attention gathers no keys or values here, so there is nothing to overlap",
    ),
    SLICED_MATMUL: (
        "rejected",
        "a matmul that sends while it computes needs torch.compile and symmetric memory: not supported",
    ),
    BIAS: ("applied", "the first rank of tp adds the bias to its term, before the all-reduce"),
    SLICED_SUM: (
        "satisfied", "a sum of which each rank keeps a slice is already a reduce-scatter",
    ),
    BRANCHES: ("degraded", "branches run one after the other, on one stream"),
    "enable_interleave_parallel_branch": ("degraded", "branches run one after the other, on one stream"),
}  # fmt: skip


TENSOR = (SLICED_MATMUL, BIAS, SLICED_SUM, BRANCHES)
"""The switches for collectives of operators that are cut over tp."""


def _biased(spread: ShardedOperator) -> bool:
    row = spread.operator.mode == "row" and "bias" in dict(spread.operator.weights)
    return row and all_reduced(spread)


READERS = {
    0: "the first stage reads inputs, the last stage targets; each tensor-parallel rank reads for itself",
    1: "the first stage reads inputs and targets, and sends the targets to the last stage",
    2: "the first stage reads inputs, the last stage targets; one rank reads for its tensor-parallel group",
    3: "one rank of a pipeline and tensor-parallel group reads, and sends the others what they use",
}


def _broadcast(level: int, sizes: Sizes) -> SwitchOutcome:
    """Describes which ranks read at this level."""
    if sizes.grid["pp"] * sizes.grid["tp"] == 1:
        return "satisfied", "each data-parallel rank is a single rank and reads for itself"
    if sizes.places[0] != sizes.places[-1]:
        return "applied", READERS[level]
    if sizes.grid["tp"] == 1:
        return "satisfied", "the first and the last stage are on one rank, which reads for itself"
    if level in (2, 3):
        return "applied", "one rank of a tensor-parallel group reads, and sends the others what they use"
    return "applied", "each tensor-parallel rank reads inputs and targets for itself"


def _fusing(job: Job, sizes: Sizes, fused: Communication | None) -> SwitchOutcome:
    """Describes the groups and buckets of the plan; without ``fused``, those of any plan."""
    if not job.parallel.comm_fusion.openstate:
        why = "parallel.comm_fusion.openstate=false: each collective carries one module or one parameter"
        return "degraded", why
    if fused is not None and not fused.groups and not fused.buckets:
        nothing = "one data-parallel rank" if sizes.replicas == 1 else "no parameter is trained"
        return "satisfied", f"{nothing}, so nothing is summed or gathered"

    # full gradients, in buckets
    limits = comm_fusion.limits(job)
    unsharded = f"unsharded gradients are sent in buckets of {bytes_text(limits.reduce)}"
    if limits.reduce == comm_fusion.DEFAULT:
        unsharded = "unsharded gradients are sent in buckets of 64 MB"
    if limits.cuts is not None:
        numbers = ", ".join(map(str, limits.cuts))
        unsharded = f"unsharded gradients are sent in buckets that end before the parameters {numbers}"

    # sharded gradients, in the groups that are gathered together, unless scatters have a limit of their own
    sharded = "a group at a time"
    size = limits.gather if limits.scatter is None else limits.scatter
    if size is not None:
        sharded = f"in groups of up to {bytes_text(size)}"

    if fused is not None and not fused.groups:
        return "satisfied", unsharded
    if fused is not None and not fused.buckets:
        return "satisfied", f"every gradient is sharded; they are sent {sharded}"
    return "satisfied", f"{unsharded}, sharded ones {sharded}"


def _rerunning(job: Job, sizes: Sizes, fused: Communication | None) -> SwitchOutcome:
    """Describes whether recomputation repeats the collectives of operators over tp."""
    recompute = job.parallel.recompute
    if sizes.grid["tp"] == 1:
        return "satisfied", "no operator is cut over tp, so recomputation sends nothing"
    if recompute is None:
        why = "a model that checkpoints its own modules waits for their collectives again"
        return "degraded", f"nothing is recomputed by the launcher; {why}"
    if recompute.comm == "keep":
        return "applied", "results of collectives over tp are kept: recomputation sends nothing"
    keep = "parallel.recompute.comm=keep avoids this"
    return "degraded", f"recomputation repeats collectives over tp and waits for them; {keep}"


OUTCOMES: dict[str, Callable[[Job, Sizes, Communication | None], SwitchOutcome]] = {
    RERUNNING: _rerunning,
    MATMUL: lambda job, sizes, fused: overlap.matmul(sizes, fused, _collectives(job)),
    REDUCING: overlap.reducing,
    GATHERING: overlap.gathering,
    FUSION: _fusing,
}
"""Functions for switches about collectives of weights and gradients, and about repeated collectives."""
